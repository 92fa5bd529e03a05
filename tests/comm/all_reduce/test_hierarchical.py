"""Hierarchical AllReduce: what it sends between nodes, what it rounds, and what it is on one node."""

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group


def _inputs(world_size: int, num_elems: int) -> list[Tensor]:
    return list(torch.randn(world_size, num_elems, generator=torch.Generator().manual_seed(3)).bfloat16())


def _reduce(group: Group, name: str, inputs: list[Tensor]) -> tuple[Tensor, Tensor, int, int]:
    """The sum, the bound on its error, and the bytes sent inside the node and between nodes."""
    all_reduce = make_all_reduce(name, group)
    result = all_reduce(inputs[group.rank])
    across = 0 if group.nodes is None else group.nodes.across.bytes_sent
    return result, all_reduce.max_error(inputs), group.bytes_sent - across, across


@pytest.mark.parametrize(("world_size", "num_nodes"), [(4, 2), (6, 3), (8, 2)])
def test_the_slow_wire_carries_one_share_per_rank(world_size: int, num_nodes: int) -> None:
    num_elems, per_node = 128 * world_size * num_nodes, world_size // num_nodes
    for _, _, inside, across in run_in_process(
        world_size, _reduce, "hierarchical", _inputs(world_size, num_elems), num_nodes=num_nodes
    ):
        assert inside == 2 * (per_node - 1) / per_node * num_elems * 2
        assert across == 2 * (num_nodes - 1) / num_nodes * num_elems * 2 / per_node


def test_only_the_wire_between_nodes_is_quantized() -> None:
    inputs = _inputs(4, 128 * 16)
    exact = run_in_process(4, _reduce, "hierarchical", inputs, num_nodes=2)
    quantized = run_in_process(4, _reduce, "hierarchical:int4", inputs, num_nodes=2)
    for (_, _, exact_inside, exact_across), (_, _, inside, across) in zip(exact, quantized, strict=True):
        assert inside == exact_inside
        assert across == exact_across * 4.25 / 16


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical:int4"])
def test_one_node_is_two_shot(name: str) -> None:
    inputs = _inputs(3, 5003)
    alone = run_in_process(3, _reduce, name, inputs)
    two_shot = run_in_process(3, _reduce, "two-shot", inputs)
    for (got, bound, sent, _), (want, _, want_sent, _) in zip(alone, two_shot, strict=True):
        assert torch.equal(got, want)
        assert (got.double() - torch.stack([x.double() for x in inputs]).sum(0)).abs().le(bound).all()
        if name == "hierarchical":
            assert sent == want_sent


def test_a_name_with_a_codec_is_lossless_where_there_is_one_node() -> None:
    assert run_in_process(2, _is_lossless, "hierarchical:int8") == [True, True]
    assert run_in_process(2, _is_lossless, "hierarchical:int8", num_nodes=2) == [False, False]
    assert run_in_process(2, _is_lossless, "hierarchical", num_nodes=2) == [True, True]


def _is_lossless(group: Group, name: str) -> bool:
    return make_all_reduce(name, group).lossless


def test_a_coarser_codec_breaks_the_bound() -> None:
    inputs = _inputs(4, 5003)
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    (fine, bound, *_), *_ = run_in_process(4, _reduce, "hierarchical:int5", inputs, num_nodes=2)
    (coarse, *_), *_ = run_in_process(4, _reduce, "hierarchical:int4", inputs, num_nodes=2)
    assert ((fine.double() - exact).abs() <= bound).all()
    assert ((coarse.double() - exact).abs() > bound).any()


def test_nodes_sums_are_rounded_once_more() -> None:
    """256 and 1 are on one node, -256 and 0 on the other: a node's bfloat16 sum of 257 is 256."""
    inputs = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, -256.0, 0.0)]
    for result, bound, *_ in run_in_process(4, _reduce, "hierarchical", inputs, num_nodes=2):
        assert result.item() == 0.0 and bound.item() >= 1.0
    for result, bound, *_ in run_in_process(4, _reduce, "two-shot", inputs):
        assert result.item() == 1.0 and bound.item() < 0.1


def _count(group: Group) -> tuple[int, int]:
    """Bytes sent and those that the ledger says would have been sent unquantized."""
    make_all_reduce("hierarchical:int4", group)(torch.ones(128 * 16, dtype=torch.bfloat16))
    [count] = group.ledger.counters.counts()
    return count.bytes_sent, count.exact_bytes


def test_the_ledger_has_what_it_would_have_sent_unquantized() -> None:
    exact = run_in_process(4, _reduce, "hierarchical", _inputs(4, 128 * 16), num_nodes=2)
    quantized = run_in_process(4, _reduce, "hierarchical:int4", _inputs(4, 128 * 16), num_nodes=2)
    for (sent, unquantized), (*_, inside, across), (*_, exact_inside, exact_across) in zip(
        run_in_process(4, _count, num_nodes=2), quantized, exact, strict=True
    ):
        assert (sent, unquantized) == (inside + across, exact_inside + exact_across)
