"""State of the sparse compressors: nothing is lost, clipping over the ranks of a node, checkpoints."""

import pytest
import torch
from harness import run_in_process
from helpers.training.shards import fill, make_flat
from torch import Tensor

from tightwire.comm.collectives.all_gather import sparse_all_gather_bytes
from tightwire.comm.group.group import Group
from tightwire.training.compression.compressors import (
    Replicas,
    clip_bytes,
    clip_spans,
    dense_bytes,
    make_compressor,
    num_sent,
    sparse_bytes,
    top_elements,
)
from tightwire.training.config.optimizer import CompressorOptions, DgcOptions, TopKOptions
from tightwire.training.engine.flat_parameters import cut_shard

_PARAMETERS = {"first": 1000, "second": 700}
_FLAT = make_flat({name: (size,) for name, size in _PARAMETERS.items()}, 48)
_SHARD = cut_shard(_FLAT, 0, 1)


def _integers(rank: int, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(10 * rank + step)
    return {name: torch.randint(-9, 10, (size,), generator=source).float() for name, size in _PARAMETERS.items()}


def _sum_integers(group: Group, options: CompressorOptions) -> tuple[Tensor, Tensor, Tensor]:
    between = make_compressor(options, Replicas(group=group, shards={"block": _SHARD}))
    given_N, got_N = torch.zeros(2, _SHARD.num_elems)
    for step in range(20):
        gradient_N = fill(_SHARD, _integers(group.rank, step))
        given_N = given_N + gradient_N
        got_N = got_N + between("block", gradient_N)
        between.step_done()
    return given_N, got_N, between.state_dict()["residual/block"]


@pytest.mark.parametrize("value_type", ["float32", "float16"])
@pytest.mark.parametrize("with_momentum", [False, True], ids=["top-k", "dgc"])
def test_sent_and_kept_elements_add_up_to_the_input(with_momentum: bool, value_type: str) -> None:
    """In whole numbers, so exactly. DGC with a momentum of 0 keeps gradients as they are."""
    common = {"sparsity": (0.75, 0.99), "rampup_begin_step": 2, "rampup_step": 10}
    common |= {"dense_below": 800, "value_type": value_type}
    options = DgcOptions(**common, momentum=0.0) if with_momentum else TopKOptions(**common)

    results = run_in_process(4, _sum_integers, options)

    given_N = torch.stack([given_N for given_N, _, _ in results]).sum(0)
    kept_N = torch.stack([kept_N for _, _, kept_N in results]).sum(0)
    assert torch.equal(results[0][1] + kept_N, given_N)
    assert kept_N.count_nonzero() > 500


def _send_extremes(group: Group) -> tuple[Tensor, Tensor]:
    shard = cut_shard(make_flat({"w": (2,)}), 0, 1)
    options = TopKOptions(sparsity=(0.0,), dense_below=0, value_type="float16")
    between = make_compressor(options, Replicas(group=group, shards={"block": shard}))
    sum_N = between("block", fill(shard, {"w": torch.tensor([1e6, 1 / 3])}))
    return sum_N[:2], between.state_dict()["residual/block"][:2]


def test_rounding_errors_of_16_bits_stay_in_the_residual() -> None:
    ((sum_N, kept_N),) = run_in_process(1, _send_extremes)

    assert sum_N.tolist() == [65504.0, torch.tensor(1 / 3).half().item()]
    assert torch.equal(sum_N + kept_N, torch.tensor([1e6, 1 / 3]))


def test_bytes_follow_the_formula() -> None:
    num_elems, num_nodes = 1_000_000, 4
    shard = cut_shard(make_flat({"w": (num_elems,)}), 0, 1)

    sent = sparse_bytes(0, num_nodes, shard, DgcOptions(), step=0)

    assert sent == sparse_all_gather_bytes(num_nodes, 1000, 4, 4) == 3 * (8 + 1000 * 8)
    # 2 (N-1)/N 4 n bytes against (N-1) 8 n (1-s): 1 / (N (1-s)) times less.
    assert dense_bytes(0, num_nodes, num_elems) / sent == pytest.approx(1 / (num_nodes * 0.001), rel=2e-3)


@pytest.mark.parametrize("num_elems", [1, 100, 1 << 18, (1 << 18) + 1])
@pytest.mark.parametrize("kind", ["normal", "zeros", "few", "beside the sample"])
def test_the_largest_elements_are_found(num_elems: int, kind: str) -> None:
    x_N = torch.randn(num_elems, generator=torch.Generator().manual_seed(num_elems))
    if kind == "zeros":
        x_N.zero_()
    elif kind == "few":
        x_N[x_N.abs() < 3.5] = 0
    elif kind == "beside the sample":
        x_N[::127] *= 100  # what the sample sees is unlike the rest
    count = num_sent(num_elems, 0.999)

    found = top_elements(x_N, count)

    assert found.unique().numel() == count
    assert torch.equal(x_N[found].abs().sort().values, x_N.abs().topk(count).values.sort().values)


def test_nan_is_among_the_largest_elements() -> None:
    x_N = torch.randn(1 << 18)
    x_N[1] = float("nan")

    assert 1 in top_elements(x_N, 20)


def _clip(group: Group) -> tuple[list[Tensor], int]:
    shard = cut_shard(_FLAT, group.rank, group.world_size)
    values = {"first": torch.full((1000,), 2.0), "second": torch.full((700,), 0.01)}
    flat_N, sent_before = fill(shard, values), group.bytes_sent
    spans = [flat_N[span.place] for span in shard.spans]
    clip_spans(spans, 5.0, group)
    return spans, group.bytes_sent - sent_before


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_uses_the_norm_of_a_parameter_on_several_ranks(world_size: int) -> None:
    results = run_in_process(world_size, _clip)

    first, second = (torch.cat([spans[i] for spans, _ in results]) for i in range(2))
    assert float(first.norm()) == pytest.approx(5.0, rel=1e-5)
    assert torch.equal(second, torch.full((700,), 0.01))
    assert {sent for _, sent in results} == {clip_bytes(world_size, 2)}


_MOMENTUM = DgcOptions(sparsity=(0.9,), rampup_begin_step=2, dense_below=800)


def _train(
    group: Group, first_step: int, steps: int, state: dict[str, Tensor] | None
) -> tuple[Tensor, dict[str, Tensor]]:
    between = make_compressor(_MOMENTUM, Replicas(group=group, shards={"block": _SHARD}))
    if state is not None:
        between.load_state_dict(state)
    sum_N = torch.zeros(_SHARD.num_elems)
    for step in range(first_step, first_step + steps):
        sum_N = sum_N + between("block", fill(_SHARD, _integers(group.rank, step)))
        between.step_done()
    return sum_N, {key: tensor.clone() for key, tensor in between.state_dict().items()}


def _train_with_a_stop(group: Group, before: int, after: int) -> tuple[Tensor, dict[str, Tensor]]:
    _, state = _train(group, 0, before, None)
    return _train(group, before, after, state)


@pytest.mark.parametrize("before", [1, 5])
def test_stopping_and_resuming_changes_no_bit(before: int) -> None:
    through = run_in_process(2, _train, 0, 8, None)
    stopped = run_in_process(2, _train_with_a_stop, before, 8 - before)

    for (_, want), (_, got) in zip(through, stopped, strict=True):
        assert want.keys() == got.keys() == {"step", "residual/block", "velocity/block"}
        assert all(torch.equal(got[key], want[key]) for key in want)
    assert int(through[0][1]["step"]) == 8


def _load(group: Group, state: dict[str, Tensor]) -> None:
    make_compressor(TopKOptions(), Replicas(group=group, shards={"block": _SHARD})).load_state_dict(state)


def test_states_of_another_compressor_are_refused() -> None:
    ((_, state),) = run_in_process(1, _train, 0, 1, None)

    with pytest.raises(ValueError, match="not of compressor top-k, or has other parameters: velocity/block"):
        run_in_process(1, _load, state)
