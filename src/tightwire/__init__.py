"""Tightwire serves Llama models split over devices whose interconnect is slow."""

__version__ = "0.2.0"
