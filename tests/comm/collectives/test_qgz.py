"""Reduce-scatter over nodes: results within their bounds, bytes inside and between nodes."""

from itertools import product

import pytest
import torch
from harness import run_in_process, run_ranks
from helpers.comm.collective_bytes import hierarchical_reduce_scatter_bytes
from torch import Tensor

from tightwire.comm.codec.codec import SUMMABLE, parse_codec, slices_for
from tightwire.comm.codec.error_bounds import quantized_sum_bound
from tightwire.comm.collectives.qgz import hierarchical_reduce_scatter
from tightwire.comm.group.group import Group, in_process_groups


def _inputs(world_size: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_elems)
    return list(torch.randn(world_size, num_elems, generator=generator).to(dtype))


def _error(got: Tensor, inputs: list[Tensor], own: slice) -> Tensor:
    return (got.double() - torch.stack([x.double() for x in inputs]).sum(0)[own]).abs()


def _scatter_over_nodes(group: Group) -> None:
    for (inside, across), num_elems, dtype in product(
        (("none", "none"), ("int8", "none"), ("none", "int5"), ("int4", "int8-g32")), (1, 5, 127, 1029, 4096), SUMMABLE
    ):
        codecs, inputs = (parse_codec(inside), parse_codec(across)), _inputs(group.world_size, num_elems, dtype)
        lengths = slices_for(num_elems, group.world_size, *codecs)
        own = slice(sum(lengths[: group.rank]), sum(lengths[: group.rank + 1]))
        sent_before = group.bytes_sent
        got = hierarchical_reduce_scatter(group, inputs[group.rank], *codecs, dtype=torch.float32)
        assert group.bytes_sent - sent_before == hierarchical_reduce_scatter_bytes(
            group, num_elems, inputs[0].element_size(), *codecs
        )
        assert got.shape == (lengths[group.rank],)
        bound_N = _over_nodes_bound(group, inputs, *codecs)
        assert (_error(got, inputs, own) <= bound_N[own]).all(), (inside, across, num_elems, dtype)


def _over_nodes_bound(group: Group, inputs: list[Tensor], inside, across) -> Tensor:
    """Each node's bound for its float32 sums, then what the leg between nodes does to those sums."""
    assert group.nodes is not None
    size = group.nodes.inside.world_size
    error_N, sums = torch.zeros(inputs[0].shape, dtype=torch.float64), []
    for start in range(0, group.world_size, size):
        sum_N, node_error_N = quantized_sum_bound(inputs[start : start + size], inside)
        if across.exact:
            # Rounded to the inputs' dtype on the way: at most half an eps of the largest it may be.
            largest_N = sum_N.double().abs() + node_error_N
            node_error_N = node_error_N + torch.finfo(inputs[0].dtype).eps / 2 * largest_N
        error_N, sums = error_N + node_error_N, [*sums, sum_N]
    return error_N + quantized_sum_bound(sums, across)[1] * (1 + torch.finfo(inputs[0].dtype).eps)


@pytest.mark.parametrize("shape", [(4, 2), (6, 3), (6, 2), (3, 3)])
def test_reduce_scatter_over_nodes(shape: tuple[int, int]) -> None:
    run_in_process(shape[0], _scatter_over_nodes, num_nodes=shape[1])


def _bytes_between_nodes(group: Group, inside: str, across: str, num_elems: int) -> int:
    assert group.nodes is not None
    before = group.nodes.across.bytes_sent
    hierarchical_reduce_scatter(group, torch.ones(num_elems).bfloat16(), parse_codec(inside), parse_codec(across))
    return group.nodes.across.bytes_sent - before


def _counted_over_nodes(group: Group) -> None:
    x = torch.ones(128 * 6 * 4, dtype=torch.bfloat16)
    exact, quantized = parse_codec("none"), parse_codec("int4")
    for inside, across in ((exact, exact), (quantized, exact), (exact, quantized), (quantized, quantized)):
        hierarchical_reduce_scatter(group, x, inside, across)
        count = group.ledger.counters.counts()[-1]
        assert (count.op, count.algorithm) == ("reduce_scatter", f"hierarchical:{inside.name},{across.name}")
        assert count.bytes_sent == hierarchical_reduce_scatter_bytes(group, x.numel(), 2, inside, across)
        assert count.exact_bytes == hierarchical_reduce_scatter_bytes(group, x.numel(), 2)


def test_reduce_scatter_over_nodes_is_counted_beside_what_it_would_send_unquantized() -> None:
    run_in_process(4, _counted_over_nodes, num_nodes=2)


def test_a_node_sends_its_tensor_once() -> None:
    """qgZ: all ranks of a node together send (K-1)/K n b/8 to other nodes, where an all-to-all sends L times that."""
    num_elems = 128 * 6 * 4
    for world_size, num_nodes in ((4, 2), (6, 2), (6, 3)):
        sent = run_in_process(world_size, _bytes_between_nodes, "int4", "int4", num_elems, num_nodes=num_nodes)
        assert sum(sent) / num_nodes == (num_nodes - 1) / num_nodes * num_elems * 4.25 / 8


def test_over_processes_with_memory_inside_nodes() -> None:
    run_ranks(4, _scatter_over_nodes, shared_memory=True, num_nodes=2)


def test_needs_a_group_with_nodes() -> None:
    [group] = in_process_groups(1)
    with pytest.raises(ValueError, match="this group was opened without nodes"):
        hierarchical_reduce_scatter(group, torch.zeros(3))
