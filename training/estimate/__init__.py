"""Formulas for the memory, arithmetic and disk space of a run. Start with ``rank_memory``."""
