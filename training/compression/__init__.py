"""Gradient compressors: sum gradients between nodes, after each node has summed its own. Start with ``make``.

``engine.compressor`` defines the interface and ``config.compression`` the options. ``dense`` sends every element, exactly or
encoded; ``sparse`` and ``dgc`` send the largest elements. A compressor gets float32 shards by name and the position of each
parameter in them.
"""
