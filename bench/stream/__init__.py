"""``tightwire bench stream``: times steps with streamed weights against their bytes and their computing. Start at ``bench.py``."""
