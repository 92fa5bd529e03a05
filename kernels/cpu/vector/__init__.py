"""Vectors, threads and compilation for the CPU kernels. Start with `simd`."""
