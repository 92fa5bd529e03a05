"""Reads and checks a run's configuration without importing torch. Start with ``tree``."""
