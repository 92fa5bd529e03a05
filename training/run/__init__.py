"""Runs training from start to end, or prints what it would take. Start with ``run``."""
