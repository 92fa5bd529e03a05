"""Sums gradients over nodes, after each node has summed its own. Start with ``make``.

``engine.compressor`` defines the interface of a compressor and ``config.compression`` its options. ``dense`` sums exactly,
``quantized`` sums through codecs, ``dgc`` sends the largest elements and applies momentum, ``top_k`` sends the largest
elements for any optimizer. Compressors see flat float32 tensors by bucket name and the position of each parameter in them, but
not the engine.
"""
