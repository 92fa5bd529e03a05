"""Triton kernels. Each file has the kernels of one host function in `kernels/`."""
