"""Shards parameters and gradients: gathers weights before use, reduces gradients after. Start with ``engine``."""
