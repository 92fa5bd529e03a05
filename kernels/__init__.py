"""The ground floor: tensors and pointers, no ranks, no layers.

Each file holds one operation: its torch reference, the fast kernels for the devices that have one, and one host
function with the reference's signature that picks between them by device (``backend``).
"""
