from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import run_in_process
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.model.checkpoint.config import config_from_hf
from tightwire.model.layout import make_layout
from tightwire.model.parallel import TensorParallel
from tightwire.model.sampling.candidates import best_candidates, candidates_needed, scatter_candidates
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler

VOCAB = 90


class Row:
    def __init__(self, **params: Any) -> None:
        self.params = SamplingParams(max_tokens=9, **params)
        self.stop_ids: frozenset[int] = frozenset()
        self.token_ids, self.num_prompt_tokens = [1, 2], 1


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 1.0, "top_k": 1}, 1),
        ({"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1}, 40),
        ({"temperature": 1.0, "top_k": 257}, 0),
        ({"temperature": 1.0}, 0),
        ({"temperature": 1.0, "top_p": 0.5}, 0),
        ({"temperature": 0.0, "logprobs": 0}, 0),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0),
        ({"temperature": 0.0, "min_tokens": 1}, 0),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, 0),
    ],
)
def test_candidates_needed(params: dict[str, Any], needed: int) -> None:
    assert candidates_needed(SamplingParams(max_tokens=1, **params)) == needed


def _joined(logits_RV: Tensor, count: int, cuts: list[int]) -> Tensor:
    """Candidates of ranks that hold the columns between ``cuts``, joined."""
    bounds = [0, *sorted(cuts), VOCAB]
    keys = [best_candidates(logits_RV[:, first:stop], count, first) for first, stop in pairwise(bounds)]
    return scatter_candidates(torch.cat(keys, dim=1), VOCAB)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    levels=st.sampled_from([2, 9, 1000]),
    cuts=st.sets(st.integers(10, 80), max_size=3).filter(lambda s: all(abs(a - b) >= 10 for a in s for b in s - {a})),
    top_k=st.sampled_from([0, 1, 2, 5, 10]),
)
def test_candidates_give_the_same_choice_as_whole_rows(
    seed: int, dtype: torch.dtype, levels: int, cuts: set[int], top_k: int
) -> None:
    """With few levels many logits are equal; the lowest ids come first for any cuts."""
    random = torch.Generator().manual_seed(seed)
    logits_RV = torch.randint(-levels, levels, (4, VOCAB), generator=random).to(dtype) * 0.01
    rows = [Row(temperature=0.7 if top_k else 0.0, top_k=top_k, top_p=0.9, min_p=0.05, seed=r) for r in range(4)]
    joined_RV = _joined(logits_RV, candidates_needed(rows[0].params), sorted(cuts))
    assert Sampler(VOCAB).sample(joined_RV, rows) == Sampler(VOCAB).sample(logits_RV.float(), rows)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf")])
def test_nan_candidates_are_kept(count: int, odd: float) -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[1, 60] = odd
    joined_RV = _joined(logits_RV, count, [45])
    rows = [Row(temperature=0.0), Row(temperature=0.0)]
    assert Sampler(VOCAB).sample(joined_RV, rows).token_ids == [0, -1]


def test_zeros_of_both_signs_are_equal_and_all_minus_infinity_is_no_choice() -> None:
    logits_RV = torch.full((2, VOCAB), -torch.inf)
    logits_RV[0, 50], logits_RV[0, 20] = 0.0, -0.0
    joined_RV = _joined(logits_RV, 1, [45])
    rows = [Row(temperature=0.0), Row(temperature=0.0)]
    assert Sampler(VOCAB).sample(joined_RV, rows).token_ids == [20, -1]


def _logits(group: Group, num_candidates: int) -> tuple[Tensor | None, int]:
    config = config_from_hf(tiny_config())
    layout = make_layout(config, group.world_size, None)
    parallel = TensorParallel(group, layout, None)
    hidden_RD = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows = parallel.shard.vocab_rows
    head_VD = torch.randn(config.vocab_size, 64, generator=torch.Generator().manual_seed(2))[rows.start : rows.stop]
    return parallel.logits(hidden_RD, head_VD, num_candidates), group.bytes_sent


@pytest.mark.parametrize("num_candidates", [1, 7])
def test_ranks_send_eight_bytes_a_candidate(num_candidates: int) -> None:
    (whole_RV, _), *_ = run_in_process(3, _logits, 0)
    (some_RV, sent), *others = run_in_process(3, _logits, num_candidates)
    assert whole_RV is not None and some_RV is not None and all(logits is None for logits, _ in others)
    kept = some_RV.isfinite()
    assert kept.sum(-1).tolist() == [3 * num_candidates] * 3
    assert torch.equal(some_RV[kept], whole_RV[kept])
    assert torch.equal(some_RV.topk(num_candidates).values, whole_RV.topk(num_candidates).values)
    assert sent == 2 * 3 * num_candidates * 8


@pytest.mark.parametrize("num_candidates", [0, 60, 102])
def test_whole_rows_are_sent_when_smaller_or_needed(num_candidates: int) -> None:
    (logits_RV, sent), *_ = run_in_process(3, _logits, num_candidates)
    assert logits_RV is not None and logits_RV.isfinite().all()
    assert sent == 2 * 3 * make_layout(config_from_hf(tiny_config()), 3, None).max_vocab_rows * 4
