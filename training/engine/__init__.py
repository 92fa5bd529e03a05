"""Sharded parameters and gradients: gathers before use, reduces after."""
