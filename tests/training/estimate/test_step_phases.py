"""What sparse compressors send while their sparsity rises, and the advice on it."""

import re

import pytest
from helpers.model.small_llama import small_llama

from tightwire.training.config.optimizer import DenseOptions, SparseOptions, TopKOptions
from tightwire.training.engine.flat_parameters import BucketPlan, plan_buckets
from tightwire.training.estimate.step import advice, sparse_phases

_ARTICLE = (0.75, 0.9375, 0.984375, 0.996)


@pytest.fixture(scope="module")
def plan() -> BucketPlan:
    return plan_buckets(small_llama(hidden_size=64, intermediate_size=256), 1)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 10, 40])
def test_phases_are_where_the_sparsity_changes(begin: int, steps: int) -> None:
    options = SparseOptions(sparsity=_ARTICLE, rampup_begin_step=begin, rampup_step=steps)

    at = [options.sparsity_at(step) for step in range(begin + steps + 2)]

    changes = {step: at[step] for step in range(len(at)) if step == 0 or at[step] != at[step - 1]}
    assert options.phases() == changes


def test_a_low_sparsity_on_many_replicas_sends_more_than_dense_sums_and_the_advice_mends_it(plan: BucketPlan) -> None:
    options = TopKOptions(sparsity=_ARTICLE, rampup_begin_step=10, rampup_step=80, dense_below=0)

    phases, dense_bytes = sparse_phases(options, plan, 32)
    (text,) = advice(options, plan, 32)

    # 31 K (4 + 4) bytes for K = N/4 elements, against 2 (31/32) N 4.
    assert phases[10].sent_bytes / dense_bytes == pytest.approx(8, rel=0.01)
    assert phases[0].sent_bytes == pytest.approx(dense_bytes, rel=0.01)
    assert phases[70].sent_bytes < dense_bytes
    assert "make the first 50 steps dense" in text
    begin, steps = (int(value) for value in re.findall(r"_step=(\d+)", text))
    followed = options.model_copy(
        update={"rampup_begin_step": begin, "rampup_step": steps, "sparsity": (0.984375, 0.996)}
    )
    assert "sparsity=[0.984375, 0.996]" in text and not list(advice(followed, plan, 32))
    assert followed.phases() == {0: None, 50: 0.984375, 70: 0.996}


def test_sparsity_that_never_pays_is_advised_against(plan: BucketPlan) -> None:
    (text,) = advice(TopKOptions(sparsity=(0.5,)), plan, 8)
    assert "use parallel.between.kind=dense, or a higher sparsity" in text


def test_many_replicas_are_advised_against(plan: BucketPlan) -> None:
    options = TopKOptions(sparsity=(0.9999,))
    assert not list(advice(options, plan, 128))
    (text,) = advice(options, plan, 129)
    assert "129 replicas" in text


def test_other_sums_need_no_advice(plan: BucketPlan) -> None:
    assert not list(advice(DenseOptions(), plan, 200)) and not list(advice(TopKOptions(sparsity=(0.5,)), plan, 1))
