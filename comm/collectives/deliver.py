"""Messages of any length from each rank to each other, in one round: hidden states and KV heads of pipeline stages."""

from collections.abc import Sequence

from torch import Tensor

from tightwire.comm.group.group import Group


def deliver(
    group: Group, what: str, parts: Sequence[Tensor], recv_bytes: Sequence[int], *, phase: str = "", site: str = ""
) -> list[Tensor]:
    """Send ``parts[i]``, (n,) uint8, to rank i; return what each rank sent, ``recv_bytes[i]`` bytes from rank i.

    All ranks call it with the same ``what``, which names the row of the ledger; a rank's own part is empty. Cost: the
    sum of the lengths of ``parts``; one round, in which only ranks with messages between them wait for each other.
    """
    with group.recorded("deliver", what, sum(part.numel() for part in parts), phase=phase, site=site):
        return group.transport.deliver(parts, recv_bytes)
