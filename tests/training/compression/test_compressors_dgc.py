"""Deep gradient compression against the article's equations, in float64 and step by step, and against momentum SGD."""

from typing import Any

import pytest
import torch
from harness import run_in_process
from helpers.training.shards import fill, make_flat
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.training.compression.compressors import Replicas, SparseCompressor, compressor_bytes
from tightwire.training.config.optimizer import DgcOptions
from tightwire.training.engine.flat_parameters import cut_shard

_FLAT = make_flat({"wide": (10, 20), "small": (7,), "tall": (9, 10)})
_SHARD = cut_shard(_FLAT, 0, 1)
_STEPS = 50
_LR = 0.05


def _gradient(rank: int, step: int, weights_N: Tensor) -> Tensor:
    """Noise around a slope towards another point on each rank; padding has none."""
    source = torch.Generator().manual_seed(1000 * rank + step)
    gradient_N = torch.randn(_FLAT.num_elems, generator=source) + 0.1 * (weights_N.float() - rank)
    return fill(_SHARD, {span.param.name: gradient_N[span.place] for span in _SHARD.spans})


def _train(group: Group, options: DgcOptions, steps: int = _STEPS) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights after some steps, computed as the engine does, and the compressor's state."""
    weights_N = torch.zeros(_FLAT.num_elems)
    replicas = Replicas(group=group, shards={"block": _SHARD}, weights=lambda name: weights_N)
    between = SparseCompressor(replicas, options)
    for step in range(steps):
        sent_before = group.bytes_sent
        expected = compressor_bytes(options, _SHARD, rank=group.rank, world_size=group.world_size, step=step)
        gradient_N = _gradient(group.rank, step, weights_N)
        if between.takes_all_sums:
            between.begin_step({"block": gradient_N})
        total_N = between("block", gradient_N)
        assert group.bytes_sent - sent_before == expected
        between.step_done()
        weights_N.add_(total_N / group.world_size, alpha=-_LR)  # as torch.optim.SGD(lr) does
    return weights_N, between.state_dict()


def _reference(num_nodes: int, options: DgcOptions, steps: int = _STEPS) -> Tensor:
    """The same by the equations, as written there: gradients divided by N, clipped to N^-1/2, decayed by d/N."""
    weights_N = torch.zeros(_FLAT.num_elems, dtype=torch.float64)
    u = [torch.zeros_like(weights_N) for _ in range(num_nodes)]
    v = [torch.zeros_like(weights_N) for _ in range(num_nodes)]
    velocity_N = torch.zeros_like(weights_N)  # of the steps and parameters that are dense
    m, clip_norm = options.momentum, None if options.clip == "global" else options.clip_norm
    for step in range(steps):
        sparsity = options.sparsity_at(step)
        gradients = [_gradient(rank, step, weights_N).double() / num_nodes for rank in range(num_nodes)]
        if options.takes_all_sums and options.clip_norm is not None:
            gradients = [each * _factor(each, options.clip_norm * num_nodes**-0.5) for each in gradients]
        update_N = torch.zeros_like(weights_N)
        for span in _SHARD.spans:
            at, decay = span.place, options.weight_decay * (len(span.param.shape) > 1)
            if sparsity is None or span.param.num_elems < options.dense_below:
                gradient = torch.stack([gradient_N[at] for gradient_N in gradients]).sum(0)
                if clip_norm is not None:
                    gradient *= _factor(gradient, clip_norm)
                gradient += decay * weights_N[at]
                velocity_N[at] = m * velocity_N[at] + gradient
                update_N[at] = gradient + m * velocity_N[at] if options.nesterov else velocity_N[at]
                for rank in range(num_nodes):
                    u[rank][at] = velocity_N[at] / num_nodes
                continue
            for rank in range(num_nodes):
                gradient = gradients[rank][at]
                if clip_norm is not None:
                    gradient = gradient * _factor(gradient, clip_norm * num_nodes**-0.5)
                gradient = gradient + decay / num_nodes * weights_N[at]
                u[rank][at] = m * u[rank][at] + gradient
                v[rank][at] += m * u[rank][at] + gradient if options.nesterov else u[rank][at]
                count = max(1, round(span.num_elems * (1 - sparsity)))
                sent = v[rank][at].abs().argsort(descending=True)[:count] + span.start
                update_N[sent] += v[rank][sent]
                v[rank][sent] = 0
                if options.mask_momentum:
                    u[rank][sent] = 0
        weights_N -= _LR * update_N
    return weights_N


def _factor(gradient: Any, max_norm: float) -> float:
    return min(1.0, max_norm / float(gradient.norm()))


_PLAIN = {"sparsity": (0.75, 0.9, 0.97), "rampup_begin_step": 10, "rampup_step": 20, "dense_below": 50}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": True},
        {"weight_decay": 0.05},
        {"clip_norm": 4.0},
        {"clip_norm": 4.0, "clip": "global"},
        {"mask_momentum": False},
        {"nesterov": True, "weight_decay": 0.05, "clip_norm": 4.0, "sparsity": (0.95,), "rampup_begin_step": 0},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_dgc_follows_its_equations(changes: dict[str, Any]) -> None:
    options = DgcOptions(**{**_PLAIN, **changes})

    results = run_in_process(4, _train, options)

    want = _reference(4, options)
    for weights_N, _ in results:
        assert torch.equal(weights_N, results[0][0])
        # 50 steps of float32 additions; a wrong choice of one number would be a thousand times as far off.
        assert torch.allclose(weights_N.double(), want, rtol=0, atol=2e-5), (weights_N - want).abs().max()


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_steps_have_the_bits_of_momentum_sgd(nesterov: bool) -> None:
    options = DgcOptions(rampup_begin_step=_STEPS, momentum=0.9, nesterov=nesterov, weight_decay=0.01)

    (weights_N, _), *_ = run_in_process(4, _train, options)

    want = _sgd(4, {"nesterov": nesterov, "momentum": 0.9})
    assert torch.equal(weights_N, want)


@pytest.mark.parametrize(("mask_momentum", "momentum"), [(False, 0.9), (True, 0.0)])
def test_without_sparsity_dgc_is_sgd_and_masking_clears_the_momentum(mask_momentum: bool, momentum: float) -> None:
    options = DgcOptions(sparsity=(0.0,), momentum=0.9, weight_decay=0.01, mask_momentum=mask_momentum, dense_below=0)

    (weights_N, _), *_ = run_in_process(4, _train, options)

    assert torch.allclose(weights_N, _sgd(4, {"momentum": momentum}), rtol=0, atol=2e-5)


def _sgd(num_nodes: int, options: dict[str, Any]) -> Tensor:
    """Weights after as many steps of torch's own optimizer on the mean gradient."""
    weights_N = torch.zeros(_FLAT.num_elems)
    decayed, other = [], []
    for span in _SHARD.spans:
        (decayed if len(span.param.shape) > 1 else other).append(torch.nn.Parameter(weights_N[span.place]))
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=_LR, **options)
    for step in range(_STEPS):
        total_N = _gradient(0, step, weights_N)
        for rank in range(1, num_nodes):
            total_N += _gradient(rank, step, weights_N)
        for span in _SHARD.spans:
            parameter = next(p for p in decayed + other if p.data_ptr() == weights_N[span.place].data_ptr())
            parameter.grad = total_N[span.place] / num_nodes
        sgd.step()
    return weights_N


# Two large parameters and a small one, which lies on both ranks of a node.
_NODE_FLAT = make_flat({"a": (64,), "small": (32,), "b": (64,)})


def _on_nodes(group: Group, options: DgcOptions) -> Tensor:
    """This rank's shard of the mean gradient that comes out after some steps, on two nodes of two ranks."""
    assert group.nodes is not None
    across, inside = group.nodes.across, group.nodes.inside
    shard = cut_shard(_NODE_FLAT, inside.rank, 2)
    between = SparseCompressor(Replicas(group=across, inside=inside, shards={"block": shard}), options)
    result_N = torch.zeros(shard.num_elems)
    for step in range(20):
        node_sum_N = 2 * _node_mean(across.rank, step)[80 * inside.rank : 80 * (inside.rank + 1)]
        result_N = between("block", node_sum_N) / 4
        between.step_done()
    return result_N


def _on_whole_nodes(group: Group, options: DgcOptions) -> Tensor:
    between = SparseCompressor(Replicas(group=group, shards={"block": cut_shard(_NODE_FLAT, 0, 1)}), options)
    result_N = torch.zeros(160)
    for step in range(20):
        result_N = between("block", _node_mean(group.rank, step)) / 2
        between.step_done()
    return result_N


def _node_mean(node: int, step: int) -> Tensor:
    return torch.randn(160, generator=torch.Generator().manual_seed(100 * node + step))


def test_a_node_of_two_ranks_equals_one_rank_with_their_mean() -> None:
    options = DgcOptions(sparsity=(0.9,), rampup_begin_step=5, dense_below=50, clip_norm=3.0, value_type="float16")

    halves = run_in_process(4, _on_nodes, options, num_nodes=2)
    whole, _ = run_in_process(2, _on_whole_nodes, options)

    assert torch.equal(halves[0], halves[2]) and torch.equal(halves[1], halves[3])
    assert torch.allclose(torch.cat(halves[:2]), whole, rtol=1e-5, atol=1e-7)
    assert whole.count_nonzero() < 100
