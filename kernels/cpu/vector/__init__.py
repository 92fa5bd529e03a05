"""Vectors, threads and compiling for the CPU kernels. Start with `simd`."""
