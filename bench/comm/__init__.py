"""``tightwire bench comm``: times and checks every AllReduce by message size. Start at ``bench.py``."""
