"""Tightwire serves dense models (Llama and its relatives) split over devices whose interconnect is slow."""

__version__ = "0.2.0"
