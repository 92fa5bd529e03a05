"""Every gradient compressor: the right sum, the same bits on every rank, bytes by formula; also over processes."""

from typing import Any

import pytest
import torch
from harness import run_in_process, run_ranks
from helpers.training.shards import fill, make_flat
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.training.compression.compressors import Replicas, compressor_bytes, kept_bytes, make_compressor
from tightwire.training.config.optimizer import (
    CompressorOptions,
    DenseOptions,
    DgcOptions,
    QuantizedOptions,
    SparseOptions,
    TopKOptions,
)
from tightwire.training.engine.flat_parameters import cut_shard

_SPARSE = {"sparsity": (0.75, 0.99), "rampup_begin_step": 1, "rampup_step": 2, "dense_below": 100}
OPTIONS: list[CompressorOptions] = [
    DenseOptions(),
    QuantizedOptions(),
    QuantizedOptions(reduce_codec="int8-g64", gather_codec="none"),
    TopKOptions(**_SPARSE),
    DgcOptions(**_SPARSE, value_type="float16", clip_norm=1.0),
]
# Shapes that a shard may have: a parameter that begins on another rank, one too small to cut, padding, nothing at all.
_UNITS = {
    "block": cut_shard(make_flat({"gone": (5008,), "cut": (4992,), "small": (99,), "next": (5000,)}, 1500), 6, 11),
    "head": cut_shard(make_flat({"w": (64,)}), 0, 1),
    "padding": cut_shard(make_flat({"far": (5000,)}, 80 * 64), 79, 80),
}


def _gradient(rank: int, step: int, name: str) -> Tensor:
    source = torch.Generator().manual_seed(100 * rank + 10 * step + len(name))
    shard = _UNITS[name]
    return fill(shard, {span.param.name: torch.randn(span.param.num_elems, generator=source) for span in shard.spans})


def _sum_some_steps(group: Group, options: CompressorOptions) -> list[Tensor]:
    between = make_compressor(options, Replicas(group=group, shards=_UNITS))
    results = []
    for step in range(4):
        for name, shard in _UNITS.items():
            sent_before, counts_before = (
                group.bytes_sent,
                sum(count.bytes_sent for count in group.ledger.counters.counts()),
            )
            expected = compressor_bytes(options, shard, rank=group.rank, world_size=group.world_size, step=step)
            results.append(between(name, _gradient(group.rank, step, name)))
            assert group.bytes_sent - sent_before == expected, (step, name)
            assert sum(count.bytes_sent for count in group.ledger.counters.counts()) - counts_before == expected, (
                step,
                name,
            )
        between.step_done()
    kept = {key: tensor for key, tensor in between.state_dict().items() if "/" in key}
    for name, shard in _UNITS.items():
        num_bytes = sum(tensor.nbytes for key, tensor in kept.items() if key.endswith(f"/{name}"))
        assert num_bytes == kept_bytes(options, shard)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: type(options).__name__)
def test_ranks_get_the_same_bits_and_send_the_formulas_bytes(world_size: int, options: CompressorOptions) -> None:
    results = run_in_process(world_size, _sum_some_steps, options)

    for others in results[1:]:
        assert all(torch.equal(got, first) for got, first in zip(others, results[0], strict=True))


def test_processes_give_the_results_of_threads() -> None:
    (first, second) = run_ranks(2, _sum_some_steps, OPTIONS[-1])
    threads, _ = run_in_process(2, _sum_some_steps, OPTIONS[-1])

    for got, other, want in zip(first, second, threads, strict=True):
        assert torch.equal(got, other) and torch.equal(got, want)


def test_the_dense_sum_is_in_node_order() -> None:
    (results, *_) = run_in_process(3, _sum_some_steps, DenseOptions())

    cases = [(step, name) for step in range(4) for name in _UNITS]
    for got, (step, name) in zip(results, cases, strict=True):
        want = (_gradient(0, step, name) + _gradient(1, step, name)) + _gradient(2, step, name)
        assert torch.equal(got, want)


def test_the_quantized_sum_has_no_bias() -> None:
    """qgZ upstream gives gradients that are a whole factor too large; a projection on the exact sum shows any factor."""
    (results, *_) = run_in_process(4, _sum_some_steps, QuantizedOptions())

    cases = [(step, name) for step in range(4) for name in _UNITS]
    exact = torch.cat([torch.stack([_gradient(rank, *case) for rank in range(4)]).sum(0) for case in cases])
    got = torch.cat(results)
    factor = torch.dot(got, exact) / torch.dot(exact, exact)
    assert abs(float(factor) - 1) < 0.01


def _call_twice(group: Group, options: CompressorOptions) -> None:
    between = make_compressor(options, Replicas(group=group, shards=_UNITS))
    between("head", _gradient(0, 0, "head"))
    between("head", _gradient(0, 0, "head"))


def test_a_flat_parameter_is_summed_once_a_step() -> None:
    with pytest.raises(RuntimeError, match="top-k was called twice for head in step 0"):
        run_in_process(1, _call_twice, TopKOptions())


def _nan_is_seen(group: Group, options: CompressorOptions) -> list[bool]:
    between = make_compressor(options, Replicas(group=group, shards=_UNITS))
    for _ in range(3):
        between.step_done()
    seen = []
    for bad in (float("nan"), float("inf")):
        gradient_N = _gradient(group.rank, 0, "block")
        if group.rank == 1:
            gradient_N[20] = bad
        seen.append(bool(between("block", gradient_N).isfinite().all()))
        between.step_done()
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: type(options).__name__)
def test_nan_reaches_every_rank(options: CompressorOptions) -> None:
    assert run_in_process(2, _nan_is_seen, options) == [[False, False]] * 2


def test_the_shapes_of_these_tests_are_as_stated() -> None:
    spans = {name: [(p.param.name, p.offset, p.num_elems) for p in shard.spans] for name, shard in _UNITS.items()}

    assert spans["block"] == [("gone", 0, 0), ("cut", 3992, 1000), ("small", 0, 99), ("next", 0, 388)]
    assert spans["padding"] == [("far", 0, 0)]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (TopKOptions, {"sparsity": (1.0,)}, "less than 1"),
        (TopKOptions, {"sparsity": ()}, "at least 1 item"),
        (TopKOptions, {"rampup_step": 0}, "rampup_step"),
        (TopKOptions, {"value_type": "int8"}, "'float32' or 'float16'"),
        (TopKOptions, {"clip_norm": 0.0}, "greater than 0"),
        (DgcOptions, {"dense_below": -1}, "dense_below"),
        (DgcOptions, {"momentum": 1.0}, "less than 1"),
        (DgcOptions, {"weight_decay": -0.1}, "greater than or equal to 0"),
    ],
)
def test_invalid_options_are_refused(make: type[SparseOptions], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_the_sparsity_is_none_then_rises_then_stays() -> None:
    options = TopKOptions(sparsity=(0.984375, 0.996, 0.999), rampup_begin_step=4, rampup_step=6)

    want = [None] * 4 + [0.984375] * 2 + [0.996] * 2 + [0.999] * 5
    assert [options.sparsity_at(step) for step in range(13)] == want
