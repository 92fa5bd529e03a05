"""``tightwire bench kernels``: codecs and matrix products on one core, AllReduce kernels on one GPU. Start at ``bench.py``."""
