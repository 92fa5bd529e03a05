"""Collectives other than AllReduce. Start with `collectives`."""
