"""Triton kernels for NVIDIA GPUs, one file for each host function in `kernels/`. Start with `linear_packed`."""
