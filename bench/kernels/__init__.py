"""``tightwire bench kernels``: block quantization, and AllReduce kernels on one GPU."""
