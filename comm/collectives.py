"""Collectives that move tensors without adding them."""

import torch
from torch import Tensor

from tightwire.comm.group import Group


def all_gather(group: Group, x: Tensor) -> list[Tensor]:
    """The ranks' tensors in rank order; all have the shape and dtype of ``x`` (any dtype, any shape).

    The own entry may share memory with ``x``. Cost: (N-1) * M bytes sent, one round.

    Raises:
        CollectiveTimeoutError, PeerLostError: a rank did not come; the group is of no use any more.
    """
    if group.world_size == 1 or x.numel() == 0:
        return [x.contiguous() for _ in range(group.world_size)]
    transport, ledger = group.transport, group.ledger
    sent_before = transport.bytes_sent
    ledger.begin("all_gather", "direct", x.nbytes)
    received = transport.gather(x.contiguous().view(-1).view(torch.uint8))
    ledger.end(transport.bytes_sent - sent_before)
    return [buf.view(x.dtype).view(x.shape) for buf in received]
