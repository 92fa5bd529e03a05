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
        self._parts(addresses, size, mask)

    def load(self, addresses: Bits, size: int, mask: Bits) -> Bits:
        """(32, size) bytes; 0 in threads out of the mask."""
        found = np.zeros((LANES, size), np.uint8)
        for data, lanes, places in self._parts(addresses, size, mask):
            found[lanes] = data[places[:, None] + np.arange(size)]
        return found

    def store(self, addresses: Bits, given: Bits, mask: Bits) -> None:
        for data, lanes, places in self._parts(addresses, given.shape[1], mask):
            data[places[:, None] + np.arange(given.shape[1])] = given[lanes]

    def _parts(self, addresses: Bits, size: int, mask: Bits) -> list[tuple[Bits, Bits, Bits]]:
        """Of each region that the threads access: its bytes, the threads, and the first place of each."""
        all_lanes, parts = mask.nonzero()[0], []
        used = addresses[all_lanes]
        if (used % size).any():
            raise PtxError(f"{size} bytes at an address that is not a multiple of it: {used}")
        numbers = self._firsts.searchsorted(used, "right") - 1
        for region in (regions := set(numbers.tolist())):
            own = slice(None) if len(regions) == 1 else numbers == region
            places = used[own] - self._firsts[region]
            if region < 0 or places.max() + size > len(self._data[region]):
                raise PtxError(f"{size} bytes outside of all tensors, at {used[own]}")
            parts.append((self._data[region], all_lanes[own], places))
        return parts
