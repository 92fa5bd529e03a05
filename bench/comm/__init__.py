"""``tightwire bench comm``: every AllReduce by message size."""
