"""Rank processes, their loop and failure detection. Start with `processes`."""
