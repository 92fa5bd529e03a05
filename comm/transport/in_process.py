"""A transport for ranks that are threads of one process: for tests, and for more ranks than the machine has cores."""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import sum_in_rank_order
from tightwire.comm.errors import CollectiveTimeoutError, CommError, PeerLostError, name_ranks
from tightwire.comm.protocols import FusedAllReduce, Moved, nothing_told


class ThreadExchange:
    """Exchanges items between the threads of one group: each gives one item and gets all items in rank order."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._given: dict[int, object] = {}
        self._round = 0
        self._items: list[object] = []
        self._left: set[int] = set()
        self._missing: frozenset[int] | None = None  # set once, by the first rank that times out

    def swap(self, rank: int, item: object, *, timeout_s: float, doing: str) -> list[object]:
        """Give ``item``; return the items of all ranks.

        Raises CollectiveTimeoutError if a rank does not arrive within ``timeout_s``, PeerLostError if it has closed its
        group. After either error all later calls fail.
        """
        with self._changed:
            if self._missing is not None:
                raise CollectiveTimeoutError(f"rank {rank} reached {doing} after the others timed out", self._missing)
            self._given[rank], this_round = item, self._round
            if len(self._given) == self.world_size:
                self._items = [self._given[rank] for rank in range(self.world_size)]
                self._given, self._round = {}, this_round + 1
                self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._round != this_round or self._has_failed(rank), timeout_s):
                self._missing = frozenset(range(self.world_size)) - frozenset(self._given)
                self._changed.notify_all()
            if self._round != this_round:
                return self._items
            if rank in self._left:
                raise CommError(f"rank {rank}: this group was closed during {doing}")
            if gone := self._left - set(self._given):
                raise PeerLostError(f"rank {rank} lost {name_ranks(gone)} in {doing}: the group was closed there", gone)
            missing = self._missing or ()
            raise CollectiveTimeoutError(
                f"rank {rank} waited {timeout_s:.1f} s in {doing}; {name_ranks(missing)} did not arrive", missing
            )

    def leave(self, rank: int) -> None:
        """Mark ``rank`` as gone: ranks that wait for it fail now, not at the deadline."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _has_failed(self, rank: int) -> bool:
        return rank in self._left or self._missing is not None or not self._left <= set(self._given)


class InProcessTransport:
    """One rank's end of a ``ThreadExchange``. ``describe`` names the running collective, for messages."""

    def __init__(
        self, threads: ThreadExchange, rank: int, *, timeout_s: float, describe: Callable[[], str | None] = lambda: None
    ) -> None:
        self.rank, self.world_size = rank, threads.world_size
        self.bytes_sent = 0
        self.fused: FusedAllReduce | None = None
        self._threads, self._timeout_s, self._describe = threads, timeout_s, describe
        self._failure: CommError | None = None

    # What a rank gives is a copy: the sender may overwrite its buffer while others still read what they got.

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        assert len(slices) == self.world_size, f"{len(slices)} slices for {self.world_size} ranks"
        given = [part.clone() for part in slices]
        received = [parts[self.rank] for parts in self._swap(given, "exchange")]
        self.bytes_sent += sum(part.numel() for part in slices) - slices[self.rank].numel()
        return received

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        received = [part.clone() for part in self._swap(buf.clone(), "gather")]
        self.bytes_sent += (self.world_size - 1) * buf.numel()
        return received

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        torch.cat(self.gather(buf), out=out)

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        received = self._swap(buf.clone(), "shift")[self.rank - 1]
        self.bytes_sent += buf.numel() if self.world_size > 1 else 0
        return received

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        received = self.exchange(parts)
        got = [part.numel() for part in received]
        assert got == list(recv_bytes), f"rank {self.rank} expected {list(recv_bytes)} bytes and got {got}"
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums in rank order; counts the bytes of a library's ring, as the other transports do for ``native``."""
        result = sum_in_rank_order(self._swap(x.clone(), "all_reduce"))
        self.bytes_sent += 2 * (self.world_size - 1) * x.numel() // self.world_size * x.element_size()
        return result.contiguous()

    def barrier(self) -> None:
        self._swap(torch.empty(0, dtype=torch.uint8), "barrier")

    def close(self) -> None:
        self._threads.leave(self.rank)

    def _swap(self, item: object, method: str) -> list:
        if self._failure is not None:
            raise self._failure
        doing = self._describe() or method
        try:
            return self._threads.swap(self.rank, item, timeout_s=self._timeout_s, doing=doing)
        except CommError as failure:
            self._failure = failure
            raise
