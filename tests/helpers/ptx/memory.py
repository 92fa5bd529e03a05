"""Memory of the PTX machine: bytes at addresses, with an error for an access that a GPU would refuse."""

from collections.abc import Sequence

import numpy as np
from helpers.ptx.numbers import LANES, Bits


class PtxError(Exception):
    """What a GPU would not do, or this machine cannot."""


class Memory:
    """Regions of bytes at the addresses where they begin."""

    def __init__(self, regions: Sequence[tuple[int, Bits]]) -> None:
        """``regions``: (first address, (bytes,) uint8), which do not overlap."""
        ordered = sorted(regions, key=lambda region: region[0])
        self._firsts = np.array([first for first, _ in ordered], np.int64)
        self._data = [data for _, data in ordered]

    def check(self, addresses: Bits, size: int, mask: Bits) -> None:
        """Raise PtxError unless ``size`` bytes are at each address of the mask, which is a multiple of it."""
        for _ in self._parts(addresses, size, mask):
            pass

    def load(self, addresses: Bits, size: int, mask: Bits) -> Bits:
        """(32, size) bytes; 0 in threads out of the mask."""
        found = np.zeros((LANES, size), np.uint8)
        for data, lanes, places in self._parts(addresses, size, mask):
            found[lanes] = data[places]
        return found

    def store(self, addresses: Bits, given: Bits, mask: Bits) -> None:
        for data, lanes, places in self._parts(addresses, given.shape[1], mask):
            data[places] = given[lanes]

    def _parts(self, addresses: Bits, size: int, mask: Bits) -> list[tuple[Bits, Bits, Bits]]:
        """Of each region that the threads access: its bytes, the threads, and (threads, size) places of theirs."""
        if (addresses[mask] % size).any():
            raise PtxError(f"{size} bytes at an address that is not a multiple of it: {addresses[mask]}")
        number, parts = np.searchsorted(self._firsts, addresses, "right") - 1, []
        for region in set(number[mask].tolist()):
            lanes = np.nonzero(mask & (number == region))[0]
            places = (addresses[lanes] - self._firsts[region])[:, None] + np.arange(size)
            if region < 0 or places.max() >= len(self._data[region]):
                raise PtxError(f"{size} bytes outside of all tensors, at {addresses[lanes]}")
            parts.append((self._data[region], lanes, places))
        return parts
