"""Counts, bytes and times of every collective. Start with `ledger`."""
