"""Row-parallel sums by kind of row; rank 0 gets all replicas' tokens in order, and the bytes are the formula's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_in_process
from helpers.comm.collective_bytes import gather_to_root_bytes
from helpers.comm.fixed_policy import make_routes
from helpers.server.local_engine import continue_prompts, local_engine
from tiny import make_tiny, tiny_config
from torch import Tensor

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.rules import Policy
from tightwire.kernels.linear import linear
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.parallel import ChoiceGather, TensorParallel
from tightwire.model.sampling.rows import greedy_rows
from tightwire.model.step import StepPlan, gather_sizes, make_plan

_CONFIG = config_from_hf(tiny_config())
_ROWS = 5
_LOSSY = "flash:int4-g64,int4-g64"


def policy(**asked: Any) -> Policy:
    setting = Setting(transport="process-group", device="cpu", world_size=2, num_nodes=1, dtype="float32")
    request = PolicyRequest(row_elems=64, max_rows=64, max_decode_rows=8, **asked)
    return Chooser(request, CostModel(setting)).policy()


@dataclass(frozen=True)
class Seen:
    """What a rank got, what each algorithm makes of the same rows, and what the ledger counted."""

    result: Tensor
    lossless: Tensor
    lossy_prompt: Tensor
    counts: list[tuple[str, str, int]]


def _sum_rows(group: Group, plan: Policy, num_generated: int) -> Seen:
    layout = make_layout(_CONFIG, group.world_size, None)
    parallel = TensorParallel(group, layout, make_routes(plan, group))
    x_TF = torch.randn(_ROWS, 8, generator=torch.Generator().manual_seed(group.rank))
    weight_DF = torch.randn(64, 8, generator=torch.Generator().manual_seed(9))
    partial_TD = linear(x_TF, weight_DF, None, num_decode_rows=num_generated)
    sums = parallel.row_sums("o_proj", 0)
    assert sums is not None
    result = parallel.sum_rows(partial_TD, sums, num_decode_rows=num_generated)
    counts = [(count.algorithm, count.phase, count.calls) for count in group.ledger.counters.counts()]
    return Seen(
        result=result,
        lossless=make_all_reduce("one-shot", group)(partial_TD),
        lossy_prompt=make_all_reduce(_LOSSY, group)(partial_TD[num_generated:]),
        counts=counts,
    )


def test_in_a_mixed_step_decode_rows_are_exact_and_prefill_rows_quantized() -> None:
    for seen in run_in_process(2, _sum_rows, policy(allreduce=_LOSSY), 2):
        assert torch.equal(seen.result[:2], seen.lossless[:2])
        assert torch.equal(seen.result[2:], seen.lossy_prompt)
        assert not torch.equal(seen.result[2:], seen.lossless[2:])
        assert seen.counts == [("one-shot", "decode", 1), (_LOSSY, "prefill", 1)]


@pytest.mark.parametrize(("num_generated", "phase", "name"), [(0, "prefill", _LOSSY), (_ROWS, "decode", "one-shot")])
def test_rows_of_one_kind_are_one_message(num_generated: int, phase: str, name: str) -> None:
    for seen in run_in_process(2, _sum_rows, policy(allreduce=_LOSSY), num_generated):
        assert seen.counts == [(name, phase, 1)]


@pytest.mark.parametrize("asked", [{}, {"allreduce": "two-shot"}, {"allreduce": "ring", "decode": "ring"}])
def test_rows_with_the_same_algorithm_travel_together(asked: dict[str, str]) -> None:
    for seen in run_in_process(2, _sum_rows, policy(**asked), 2):
        assert [(phase, calls) for _, phase, calls in seen.counts] == [("prefill", 1)]
        assert torch.equal(seen.result, seen.lossless)


def _rounded_sum(group: Group, sum_dtype: torch.dtype | None) -> tuple[Tensor, Tensor, int]:
    parallel = TensorParallel(
        group, make_layout(_CONFIG, group.world_size), make_routes(policy(allreduce="one-shot"), group), sum_dtype
    )
    partial_TD = torch.randn(_ROWS, 64, generator=torch.Generator().manual_seed(group.rank))
    result = parallel.sum_rows(partial_TD, parallel.row_sums("o_proj", 0), num_decode_rows=0)
    return partial_TD, result, sum(count.bytes_sent for count in group.ledger.counters.counts())


@pytest.mark.parametrize("sum_dtype", [None, torch.float32, torch.bfloat16])
def test_messages_are_in_the_dtype_of_sums_and_results_in_that_of_the_partial_sums(
    sum_dtype: torch.dtype | None,
) -> None:
    (a, result, num_bytes), (b, other, _) = run_in_process(2, _rounded_sum, sum_dtype)
    dtype = sum_dtype or torch.float32
    assert result.dtype == torch.float32 and torch.equal(result, other)
    assert torch.equal(result, (a.to(dtype).float() + b.to(dtype).float()).to(dtype).float())
    assert num_bytes == a.numel() * dtype.itemsize


def test_a_single_rank_has_nothing_to_sum() -> None:
    (group,) = run_in_process(1, _own_group)
    layout = make_layout(_CONFIG, 1, None)
    parallel = TensorParallel(group, layout, None)
    assert parallel.row_sums("o_proj", 0) is None


def _own_group(group: Group) -> Group:
    return group


@pytest.mark.parametrize("asked", [{"allreduce": "flash:int4-g64,int4-g64"}, {"allreduce": "flash:int3-g32,int5-g64"}])
def test_a_text_does_not_depend_on_other_sequences_with_a_lossy_algorithm(
    asked: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path)))
    prompts = [[5], [72, 101, 108, 108, 111], list(range(40, 100)), [200, 3, 17] * 11]
    alone: list[list[int]] = []
    for prompt in prompts:
        with local_engine(checkpoint, tp=2, all_reduce=policy(**asked), max_model_len=128) as local:
            alone += continue_prompts(local.engine, [prompt], max_tokens=20)
    with local_engine(
        checkpoint, tp=2, all_reduce=policy(**asked), max_model_len=128, max_num_batched_tokens=16, max_num_seqs=8
    ) as local:
        together = continue_prompts(local.engine, prompts, max_tokens=20)
        counted = {(count.algorithm, count.phase) for count in local.groups[0].ledger.counters.counts()}
    assert together == alone
    lossy = next(iter(asked.values()))
    assert (lossy, "prefill") in counted and (lossy, "decode") not in counted


def _last_chosen(group: Group, num: int) -> list[int]:
    parallel = TensorParallel(group, make_layout(_CONFIG, group.world_size, None), None)
    chosen_R = torch.tensor([5, 6, 7], dtype=torch.int32) if group.rank == 0 else None
    return parallel.last_chosen(chosen_R, num).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_tokens_that_rank_0_chose(world_size: int) -> None:
    assert run_in_process(world_size, _last_chosen, 2) == [[5, 6]] * world_size


def test_a_plan_that_defers_more_tokens_than_were_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match="4 deferred tokens, but the last step chose 3"):
        run_in_process(1, _last_chosen, 4)


def plan_of(num_rows: int) -> StepPlan:
    return make_plan(
        token_ids=range(num_rows),
        query_lens=(),
        context_lens=(),
        block_tables=(),
        num_decode_rows=0,
        logit_rows=range(num_rows),
        sampling=greedy_rows(num_rows),
    )


def _gather_choices(world: Group, tp: int, brought: list[int]) -> tuple[Tensor | None, int]:
    gather, replica = ChoiceGather(world, tp), world.rank // tp
    results = torch.arange(brought[replica]) + 100 * replica if brought[replica] else None
    sent_before = world.bytes_sent
    gathered = gather.gather(gather_sizes([plan_of(num_rows) for num_rows in brought]), results)
    assert gather.num_begun == 1
    return gathered, world.bytes_sent - sent_before


@pytest.mark.parametrize(("tp", "brought"), [(1, [2, 3]), (2, [2, 1]), (2, [0, 3, 0]), (3, [1, 2]), (1, [0, 2])])
def test_tokens_of_all_replicas_are_gathered_in_order(tp: int, brought: list[int]) -> None:
    met = run_in_process(tp * len(brought), _gather_choices, tp, brought)

    gathered = met[0][0]
    assert gathered is not None and all(results is None for results, _ in met[1:])
    assert gathered.tolist() == [100 * replica + i for replica, num in enumerate(brought) for i in range(num)]
    sizes = [8 * num * (place == 0) for num in brought for place in range(tp)]
    assert [sent for _, sent in met] == [gather_to_root_bytes(rank, sizes) for rank in range(len(met))]


def test_nothing_is_gathered_when_only_the_first_replica_has_rows() -> None:
    assert gather_sizes([plan_of(3), plan_of(0)]) == b""
    assert gather_sizes([plan_of(3)]) == b""
