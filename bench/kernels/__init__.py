"""``tightwire bench kernels``: codecs and matrix products on one core, codecs on one GPU. Start at ``bench.py``."""
