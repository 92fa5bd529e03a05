"""Gradient compressors: sum gradients between nodes, after each node has summed its own. Start with ``compressors``."""
