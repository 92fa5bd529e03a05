"""Base class of the AllReduces: checks the input, leaves it unchanged, records the call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import SUMMABLE, Carried, Feedback
from tightwire.comm.group.group import Group


class BaseAllReduce(ABC):
    """Sums a tensor over ``group``; a subclass defines the algorithm, its bytes and its error bound.

    All ranks call with the same shape and dtype (fp32, bf16 or fp16), in the same order, on one thread per group. The
    result is a new contiguous tensor with the same bits on every rank and in every run, outside any autograd graph.
    """

    name: str
    lossless = True

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group, self._transport = group, group.transport
        self._counter = group.transport if group.nodes is None else group  # counts the bytes sent
        self._ledger = group.ledger
        self._fused: Callable[[Tensor, Carried], Tensor] | None = None  # one kernel in place of ``_reduce``
        self._hides_coding = False  # whether that kernel encodes

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        """Return the sum over ranks of ``x``, any shape.

        The ledger records it under ``phase`` and ``site``. Codecs with feedback send the rounding errors that ``feedback``
        holds for this forward pass, and leave theirs there.

        Raises TypeError for other dtypes; CollectiveTimeoutError or PeerLostError if a rank does not arrive.
        """
        if x.dtype not in SUMMABLE:
            raise TypeError(f"all_reduce sums {', '.join(map(str, SUMMABLE))}, got {x.dtype}; convert it first")
        if x.requires_grad:
            x = x.detach()
        if self.world_size == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        carried = (None, None) if feedback is None else self._carried(feedback, phase, x)
        self._ledger.begin("all_reduce", self.name, x.nbytes, phase, site)
        if self._fused is None:
            sent_before = self._counter.bytes_sent
            # A view costs as much as the ledger, and view(x.shape) three times as much.
            result = self._reduce(x.contiguous().view(-1), carried).view_as(x)
            sent = self._counter.bytes_sent - sent_before
        else:
            if self._hides_coding:
                self._ledger.hide_coding()
            result = self._fused(x.contiguous(), carried)
            sent = self.wire_bytes(x.numel(), x.element_size())
            self._transport.bytes_sent += sent
        self._ledger.end(sent, self._exact_bytes(x))
        return result

    def _exact_bytes(self, x: Tensor) -> int | None:
        """Bytes that the exact algorithm of the same shape would have sent for ``x``, or None if this one is exact."""
        return None

    def _carried(self, feedback: Feedback, phase: str, x: Tensor) -> Carried:
        """Return the errors of earlier sums of the phase, for each leg that sends them along."""
        return None, None

    @abstractmethod
    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        """Sum the contiguous ``x_N`` (N > 0) over at least two ranks into a new tensor; ``x_N`` is only read.

        The codecs of the two legs add the errors in ``carried`` before encoding, and overwrite them with the new ones.
        """

    @abstractmethod
    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        """Bytes this rank sends to others for ``num_elems`` elements, exactly."""

    @abstractmethod
    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Elementwise bound on |result - exact sum| for the ranks' ``inputs``, float64; inf where the sum overflows."""
