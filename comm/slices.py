"""How a flat tensor is cut into one slice per rank. Every algorithm that shares out the summing cuts this way."""

from torch import Tensor, uint8


def slice_lengths(num_elems: int, num_slices: int, multiple: int = 1) -> list[int]:
    """Lengths of consecutive slices of ceil(n / slices) elements, rounded up to a ``multiple``; the last may be short.

    Slices begin at multiples of ``multiple``: a codec's groups are never cut. There may be none left for the last
    slices, which are then empty.
    """
    length = -(-num_elems // num_slices)
    length = -(-length // multiple) * multiple
    return [max(0, min(length, num_elems - i * length)) for i in range(num_slices)]


def as_bytes(x_N: Tensor) -> Tensor:
    """The memory of a contiguous one-dimensional tensor as uint8, not copied."""
    return x_N.view(uint8)
