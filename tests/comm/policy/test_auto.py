"""``auto`` without a policy: one-shot up to where the seeds of the group's own transport see two-shot ahead."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.policy.auto import AutoAllReduce
from tightwire.comm.policy.cost import CostModel, size_grid


def _group(world_size: int, device: str, *, fused: bool) -> Group:
    group = in_process_groups(world_size)[0]
    kernels: Any = _Fused() if fused else None
    group.transport.fused = kernels
    return replace(group, device=torch.device(device))


class _Fused:
    """Stands for a transport's kernels, which nobody calls here."""

    one_shot = two_shot = in_kernel = None


@pytest.mark.parametrize(
    ("device", "fused", "transport"),
    [
        ("cpu", True, "shared-memory"),
        ("cpu", False, "process-group"),
        ("cuda", True, "peer-memory"),
        ("cuda", False, "process-group"),
    ],
)
@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_takes_what_the_seeds_of_the_transport_say_is_faster(
    device: str, fused: bool, transport: str, world_size: int
) -> None:
    auto = AutoAllReduce(_group(world_size, device, fused=fused))
    setting = Setting(transport=transport, device=device, world_size=world_size, num_nodes=1, dtype="bfloat16")
    costs = CostModel(setting)
    chosen = {size: auto.choose(size // 2, 2).name for size in size_grid(1024, 64 << 20) if size % 2 == 0}
    assert set(chosen.values()) == {"one-shot", "two-shot"}
    for size, name in chosen.items():
        assert costs.predict(name, size).us == min(costs.predict(n, size).us for n in ("one-shot", "two-shot")), size


def test_two_ranks_in_shared_memory_need_only_one_shot() -> None:
    """It sends no more than two-shot there, in one round; over messages two-shot adds fewer numbers."""
    auto = AutoAllReduce(_group(2, "cpu", fused=True))
    assert {auto.choose(num_elems, 2).name for num_elems in (1, 1 << 30)} == {"one-shot"}
