"""The slot between nodes: how gradients that are summed inside each node become sums over all nodes.

``engine.between`` says what a slot does, ``config.between`` what it is told, ``make`` makes it. ``dense`` sums as it is, ``quantized`` through
codecs, ``dgc`` sends few numbers and has the momentum in it, ``top_k`` sends few numbers for any optimizer. None knows the
engine: they see flat float32 tensors by the unit's name, and which parameters lie where in them.
"""
