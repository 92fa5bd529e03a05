"""``tightwire bench compare``: compares two results of one bench. Start at ``bench.py``."""
