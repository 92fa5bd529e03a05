"""Rank 0 gets every replica's rows in order, all logits or the best; the bytes are the formula's; an idle replica sends none."""

from typing import NamedTuple

import pytest
import torch
from harness import run_in_process
from tiny import tiny_config
from torch import Tensor

from tightwire.comm.collectives.collectives import gather_to_root_bytes
from tightwire.comm.group.group import Group
from tightwire.model.checkpoint.config import config_from_hf
from tightwire.model.layout import make_layout
from tightwire.model.logits_gather import LogitsGather
from tightwire.model.step import StepPlan, gather_sizes, make_plan

CONFIG = config_from_hf(tiny_config())


class Brings(NamedTuple):
    num_rows: int
    num_candidates: int = 0


def plan_of(brings: Brings) -> StepPlan:
    return make_plan(
        token_ids=range(brings.num_rows),
        query_lens=(),
        context_lens=(),
        block_tables=(),
        num_decode_rows=0,
        logit_rows=range(brings.num_rows),
        num_candidates=brings.num_candidates,
    )


def rows_of(replica: int, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(num_rows, CONFIG.vocab_size, generator=generator)


def _gather(world: Group, tp: int, brought: list[Brings]) -> tuple[Tensor | None, int]:
    layout = make_layout(CONFIG, tp, None)
    gather = LogitsGather(world, layout)
    replica, place = divmod(world.rank, tp)
    own = layout.shards[place].vocab_rows
    num_rows = brought[replica].num_rows
    local_RV = rows_of(replica, num_rows)[:, own.start : own.stop] if num_rows else None
    sent_before = world.bytes_sent
    gathered = gather.gather(gather_sizes([plan_of(brings) for brings in brought]), local_RV)
    assert gather.num_begun == 1
    return gathered, world.bytes_sent - sent_before


@pytest.mark.parametrize(
    ("tp", "brought"),
    [
        (1, [Brings(2), Brings(3)]),
        (2, [Brings(2), Brings(1)]),
        (2, [Brings(0), Brings(3), Brings(0)]),
        (3, [Brings(1), Brings(2, 1)]),
        (2, [Brings(2, 1), Brings(4, 3)]),
        (2, [Brings(2, 200), Brings(1)]),  # so many candidates that all logits are fewer bytes
        (1, [Brings(0), Brings(2, 1)]),
    ],
)
def test_rows_of_all_replicas_are_gathered_in_order(tp: int, brought: list[Brings]) -> None:
    met = run_in_process(tp * len(brought), _gather, tp, brought)

    gathered = met[0][0]
    assert gathered is not None and all(rows is None for rows, _ in met[1:])
    want = torch.cat([rows_of(replica, brings.num_rows) for replica, brings in enumerate(brought)])
    kept = gathered > -torch.inf
    assert torch.equal(gathered[kept], want[kept])
    assert torch.equal(gathered.argmax(1), want.argmax(1))
    shards = make_layout(CONFIG, tp, None).shards
    sizes, row = [], 0
    for brings in brought:
        whole = brings.num_candidates in (0, 200)
        assert kept[row : row + brings.num_rows].all() == (whole or not brings.num_rows)
        row += brings.num_rows
        each = [4 * len(s.vocab_rows) if whole else 8 * brings.num_candidates for s in shards]
        sizes += [brings.num_rows * size for size in each]
    assert [sent for _, sent in met] == [gather_to_root_bytes(rank, sizes) for rank in range(len(met))]


def test_nothing_is_gathered_when_only_the_first_replica_has_rows() -> None:
    assert gather_sizes([plan_of(Brings(3)), plan_of(Brings(0))]) == b""
    assert gather_sizes([plan_of(Brings(3))]) == b""
