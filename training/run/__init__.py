"""Runs training, or estimates its cost in a dry run. Start with ``run``."""
