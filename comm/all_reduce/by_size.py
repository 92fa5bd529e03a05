"""An AllReduce that selects another AllReduce by message size. Costs a comparison; nothing with a single entry."""

from collections.abc import Sequence

from torch import Tensor

from tightwire.comm.protocols import AllReduce


class SizedAllReduce:
    """Each message uses the algorithm of the first limit that it does not exceed. The ledger records that algorithm.

    All ranks call with the same shape, so all select the same algorithm.
    """

    def __init__(self, table: Sequence[tuple[int | None, AllReduce]], name: str = "by size") -> None:
        if not table or table[-1][0] is not None or any(limit is None for limit, _ in table[:-1]):
            raise ValueError("the last entry, and no other, is for messages of any size")
        limits = [limit for limit, _ in table if limit is not None]
        if limits != sorted(set(limits)):
            raise ValueError(f"limits must rise, got {limits}")
        self.name = name
        self._limited = [(limit, all_reduce) for limit, all_reduce in table if limit is not None]
        self._largest = table[-1][1]

    @property
    def lossless(self) -> bool:
        return self._largest.lossless and all(all_reduce.lossless for _, all_reduce in self._limited)

    def __call__(self, x: Tensor, phase: str = "", site: str = "") -> Tensor:
        return self._choose(x.nbytes)(x, phase, site)

    def choose(self, num_elems: int, elem_bytes: int) -> AllReduce:
        """The algorithm for a message of this size."""
        return self._choose(num_elems * elem_bytes)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return self.choose(num_elems, elem_bytes).wire_bytes(num_elems, elem_bytes)

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return self._choose(inputs[0].nbytes).max_error(inputs)

    def _choose(self, num_bytes: int) -> AllReduce:
        for limit, all_reduce in self._limited:
            if num_bytes <= limit:
                return all_reduce
        return self._largest


def by_size(table: Sequence[tuple[int | None, AllReduce]]) -> AllReduce:
    """Return the AllReduce for ``table``: (largest message in bytes, algorithm) with rising limits, the last one None.

    Raises:
        ValueError: the limits do not rise, or the last one is not None.
    """
    return table[0][1] if len(table) == 1 and table[0][0] is None else SizedAllReduce(table)
