"""Tightwire serves Llama models split over devices whose interconnect is slow."""

__version__ = "0.1.0"
