"""CPU kernels, compiled with numba. Start with `linear`."""
