"""``tightwire bench compare``: what changed between two results of one bench."""
