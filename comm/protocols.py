"""Protocols of comm: ``Transport`` moves bytes between ranks, ``AllReduce`` sums a tensor over any transport."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from tightwire.comm.codec.codec import Carried, Codec, Feedback

Moved = Callable[[int], None]  # called with the number of bytes that arrived, as a sign of progress


def nothing_told(num_bytes: int) -> None:
    """A ``Moved`` that does nothing."""


class KernelSums(Protocol):
    """One-shot sums of one buffer that a caller's kernel runs repeatedly by itself (``tw_make_sum``).

        kernel_sums = sums.begin(x, out, "decode", sites)
        while (num_done := sums.wait()) < len(sites):
            ...  # call the kernel with ``kernel_sums``: it makes sums from number ``num_done`` on
        sums.end()

    ``end`` is always called, also after an error; no other collective runs before it. All ranks begin with the same
    shape, dtype and number of sites.
    """

    def begin(self, x: Tensor, out: Tensor, phase: str, sites: Sequence[str]) -> Any:
        """Return a ``tw_sums *`` for the kernel. Each sum, one per site, reads ``x`` and writes ``out``."""
        ...

    def wait(self) -> int:
        """Return how many sums are done, after making one that the kernel left; raises as a single AllReduce does."""
        ...

    def end(self) -> None:
        """Record the sums that are done, as if each were a call."""
        ...


class FusedAllReduce(Protocol):
    """Whole AllReduces in one kernel, for transports whose ranks map each other's memory.

    Results equal those of the same algorithm over messages, to the bit; the caller counts its bytes by the formula.
    ``x`` is contiguous, of any shape, not empty, and only read; the result is a new tensor of its shape. ``carried`` has
    the errors of the two legs (``Feedback``).
    """

    tells_coding: bool  # whether ``flash`` records its encoding and decoding time in the group's ledger
    in_kernel: KernelSums | None  # ``one_shot`` inside a caller's kernel, where available

    def one_shot(self, x: Tensor) -> Tensor: ...

    def flash(
        self, x: Tensor, reduce_codec: Codec, gather_codec: Codec, carried: Carried = (None, None)
    ) -> Tensor: ...  # two-shot if both are exact


class Transport(Protocol):
    """Moves byte tensors between the ranks of one group.

    Every method is collective: all ranks call the same methods in the same order with the same sizes. Every wait has a
    deadline and raises ``CollectiveTimeoutError`` with the missing ranks. Received tensors belong to the caller; this
    rank's own entry may be the tensor it gave. ``bytes_sent`` grows by exactly the payload bytes this rank sent to
    others.
    """

    rank: int
    world_size: int
    bytes_sent: int
    fused: FusedAllReduce | None  # without it, algorithms go through the methods below

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """All-to-all: ``slices[i]`` goes to rank i; entry i of the result, of the same length, is from rank i."""
        ...

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """All-gather: the buffers of all ranks in rank order, of ``sizes`` bytes, by default as long as ``buf``."""
        ...

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        """All-gather buffers of equal length into ``out`` in rank order, without intermediate copies.

        ``buf`` may be this rank's part of ``out``. ``moved`` is called as bytes arrive, where the host sees that.
        """
        ...

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        """One ring step: send ``buf`` to rank + 1, return the ``recv_bytes`` (by default as many) that rank - 1 sent."""
        ...

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """Send ``parts[i]`` to rank i, each of any length; entry i of the result has the ``recv_bytes[i]`` from rank i."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The library's sum (gloo, NCCL), a new tensor."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None:
        """Stop taking part. Another thread's call that waits for other ranks raises; over gloo, by its deadline."""
        ...


class AllReduce(Protocol):
    """Sums a tensor over the group into a new contiguous one of its shape and dtype; the same bits on every rank."""

    name: str

    @property
    def lossless(self) -> bool:
        """Whether nothing is quantized: the only error is that of adding and of rounding sums to the dtype."""
        ...

    # ``phase`` (such as "decode") and ``site`` (such as "o_proj 3") are for the ledger. Codecs with feedback
    # send along the rounding errors of earlier sums of these rows, which ``feedback`` holds; other algorithms ignore it.
    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor: ...

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        """Bytes one rank sends for a tensor of ``num_elems``, exactly as the transport counts them."""
        ...

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Elementwise bound on |result - exact sum| for these per-rank inputs; follows from the algorithm."""
        ...
