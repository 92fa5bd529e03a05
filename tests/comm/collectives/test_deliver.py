"""Parts of unlike lengths arrive, and the ledger counts them in a row of their own."""

import torch
from harness import run_in_process

from tightwire.comm.collectives.deliver import deliver
from tightwire.comm.group.group import Group


def _send_on(group: Group) -> tuple[list[list[int]], tuple[str, str, str, int, int]]:
    """Rank r sends r + 1 bytes of its number to the next rank, if there is one."""
    rank, last = group.rank, group.world_size - 1
    parts = [torch.full((rank + 1 if peer == rank + 1 else 0,), rank, dtype=torch.uint8) for peer in range(last + 1)]
    sizes = [rank if peer == rank - 1 else 0 for peer in range(last + 1)]
    received = deliver(group, "hidden-state", parts, sizes, phase="prefill", site="stage 0")
    count = group.ledger.counters.counts()[0]
    return [part.tolist() for part in received], (*count[:3], count.calls, count.bytes_sent)


def test_each_part_arrives_and_is_counted() -> None:
    results = run_in_process(3, _send_on)
    assert [received for received, _ in results] == [[[], [], []], [[0], [], []], [[], [1, 1], []]]
    row = ("deliver", "hidden-state", "prefill", 1)
    assert [count for _, count in results] == [(*row, 1), (*row, 2), (*row, 0)]
