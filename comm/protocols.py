"""The two seams of the comm floor: how bytes move (``Transport``) and how a tensor is summed (``AllReduce``).

An algorithm is written once against ``Transport``; a transport knows nothing of algorithms. Everything that a caller
above this floor needs is in ``Group`` (comm/group.py), which holds one transport and one ledger.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tightwire.comm.codec.codec import Codec

Moved = Callable[[int], None]  # told of bytes that have come, so that whoever waits knows that something moves


def nothing_told(num_bytes: int) -> None:
    """A ``Moved`` that nobody listens to."""


class KernelSums(Protocol):
    """One-shots that a kernel of the caller's makes by itself, of one buffer again and again: ``kernels.shared_sums``.

        table = sums.begin(x, out, sites)
        while (num_done := sums.wait()) < len(sites):
            ...  # call the kernel, which makes sums from number ``num_done`` on
        sums.end()

    ``end`` is called whatever happens; no other collective runs before. All ranks begin with the same shape, dtype and
    number of sites.
    """

    def begin(self, x: Tensor, out: Tensor, sites: Sequence[str]) -> int:
        """The address of the kernel's table. Each sum is of what ``x`` then holds and goes to ``out``; both contiguous.

        ``sites``: what each is for, as the ledger's ``site``.
        """
        ...

    def wait(self) -> int:
        """How many sums are done, when one that the kernel left for want of a rank has been made too.

        Raises:
            CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: as a single AllReduce does.
        """
        ...

    def end(self) -> None:
        """Count what was done, as if each had been called."""
        ...


class FusedAllReduce(Protocol):
    """Whole AllReduces in one kernel, for transports whose ranks map each other's memory.

    The same results to the bit, and the same ``bytes_sent``, as the algorithm of that name over the transport's
    messages. ``x`` is contiguous, of any shape, not empty, and only read; the result is a new tensor of its shape.
    """

    tells_coding: bool  # whether ``flash`` tells the group's ledger how long it encodes and decodes
    in_kernel: KernelSums | None  # ``one_shot`` for a caller's kernel; None: only by itself

    def one_shot(self, x: Tensor) -> Tensor: ...

    def two_shot(self, x: Tensor) -> Tensor: ...

    def flash(self, x: Tensor, reduce_codec: Codec, gather_codec: Codec) -> Tensor: ...


class Transport(Protocol):
    """Moves byte tensors between the ranks of one group.

    Every method is collective: all ranks call the same methods in the same order with the same sizes. Every wait has
    a deadline and raises ``CollectiveTimeoutError`` naming the ranks that did not come. Received tensors belong to
    the caller. ``bytes_sent`` grows by exactly the payload bytes this rank sent to others.
    """

    rank: int
    world_size: int
    bytes_sent: int
    fused: FusedAllReduce | None  # None: algorithms go through the methods below

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """All-to-all: ``slices[i]`` goes to rank i, the result's entry i came from rank i (own entry included).

        All ranks cut alike: what comes from each rank is as long as this rank's own entry. The own entry may be the
        given tensor itself.
        """
        ...

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """All-gather: the buffers of all ranks in rank order (own entry included, maybe ``buf`` itself).

        ``sizes``: bytes of each rank's buffer, the same list on all ranks; None: all are as long as ``buf``.
        """
        ...

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        """All-gather of equally long buffers into ``out``, one after the other in rank order, without copies between.

        ``buf`` may be the own part of ``out``. ``moved`` is told of bytes of ``out`` as they come, where the host sees them.
        """
        ...

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        """One ring step: send ``buf`` to rank + 1, return the ``recv_bytes`` (None: as many) that rank - 1 sent."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The library's own sum, when it has one (gloo, NCCL): what ``native`` uses. Returns a new tensor."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None:
        """Take part no more. A call of another thread's that waits for others ends with an error, over gloo by its deadline."""
        ...


class AllReduce(Protocol):
    """Sums a tensor over the group into a new one, contiguous, of its shape and dtype; the same bits on every rank.

    The input is left as it was.
    """

    name: str

    @property
    def lossless(self) -> bool:
        """Whether nothing is quantized: the only error is that of adding and of rounding sums to the dtype."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        """Bytes one rank sends for a tensor of ``num_elems``, exactly as the transport counts them."""
        ...

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Elementwise bound on |result - exact sum| for these per-rank inputs; follows from the algorithm."""
        ...
