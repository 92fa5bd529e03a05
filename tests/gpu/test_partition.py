"""Replicas on a GPU that keep a part of each layer and gather the rest: the logits of layers of their own."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.comm.in_process_partition import in_process_partition
from helpers.model.partition_bodies import Work, World, build, expect, run_passes
from helpers.model.partition_checks import NUM_LAYERS, PROMPTS, beside, plan_for
from tiny import make_tiny
from torch import Tensor

from tightwire.comm.group.group import in_process_groups
from tightwire.comm.transport.in_process import InProcessTransport

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_shared_layers_give_the_logits_of_own_ones(
    codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swap = InProcessTransport._swap

    def swap_what_is_there(self: InProcessTransport, item: object, method: str) -> list[Any]:
        torch.cuda.synchronize()  # threads pass tensors to each other's streams
        return swap(self, item, method)

    monkeypatch.setattr(InProcessTransport, "_swap", swap_what_is_there)
    location = make_tiny(tmp_path, num_hidden_layers=NUM_LAYERS)
    world = World(tp=1, dp=2)
    work = Work(str(location), plan_for(world, codec), PROMPTS[:2])
    alone = replace(in_process_groups(1)[0], device=device)
    want = expect(work, alone, beside(work.plan))
    peers = [replace(one, inside=replace(one.inside, device=device)) for one in in_process_partition(1, 2)]

    def run(rank: int) -> list[Tensor]:
        runner = build(alone, peers[rank], work)
        try:
            logits = run_passes(runner, rank, work.prompts[rank])
            peers[rank].await_all()  # who ends first would be missed by the one that still fetches
            return logits
        finally:
            runner.close()

    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(run, range(2)))

    assert [len(own) for own in got] == [3, 2]
    for own, its in zip(got, want, strict=True):
        assert all(torch.equal(mine, wanted) for mine, wanted in zip(own, its, strict=True))
    assert all(sum(count.bytes_sent for count in one.inside.ledger.counters.counts()) > 0 for one in peers)
