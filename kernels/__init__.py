"""Kernels: tensors and pointers, no ranks, no layers. Start with `linear`.

Each file here is the host function of one operation, which picks `cpu/` or `cuda/` by device. `spec/` has the torch
references, with the same signatures.
"""
