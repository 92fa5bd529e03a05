"""all_gather, reduce_scatter, over nodes too, broadcast, gather_to_root and sparse_all_gather: results, bytes, refusals."""

import hashlib
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from harness import Over, Runner, run_in_process
from helpers.comm.collective_bytes import broadcast_bytes, gather_to_root_bytes
from torch import Tensor

from tightwire.comm.codec.codec import SUMMABLE, parse_codec, slices_for
from tightwire.comm.codec.error_bounds import quantized_sum_bound, quantized_total_bound
from tightwire.comm.collectives.all_gather import all_gather, sparse_all_gather, sparse_all_gather_bytes
from tightwire.comm.collectives.one_rank import broadcast, gather_to_root
from tightwire.comm.collectives.reduce_scatter import reduce_scatter, reduce_scatter_bytes
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.ledger.ledger import Counters

CODECS = ("none", "int8", "int6-g64", "int4-g32-had")
OVER = [Over(transport, 3) for transport in ("gloo", "in-process", "shared-memory", "nccl-calls")]


@pytest.fixture(scope="module", params=OVER, ids=str)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(request.param)
    yield runner
    runner.close()


def _inputs(world_size: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_elems)
    return list(torch.randn(world_size, num_elems, generator=generator).to(dtype))


def _gather_each_kind(group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for shape in ((), (1,), (3, 5), (0, 4)):
            whole = torch.randint(0, 2, (group.world_size, *shape), generator=torch.Generator().manual_seed(1)).to(
                dtype
            )
            sent_before = group.bytes_sent
            received = all_gather(group, whole[group.rank])
            assert group.bytes_sent - sent_before == (group.world_size - 1) * whole[0].nbytes
            assert len(received) == group.world_size
            assert all(torch.equal(got, want) for got, want in zip(received, whole, strict=True)), (dtype, shape)


def _gather_transposed(group: Group) -> None:
    x = torch.arange(6.0).view(2, 3).t() + group.rank
    received = all_gather(group, x)
    assert all(torch.equal(got, x - group.rank + rank) for rank, got in enumerate(received))


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _scatter(group: Group) -> list[str]:
    """Each rank's slice fits in the whole sum, within the codec's bound; the slices of all ranks cover it."""
    results = []
    for name, num_elems, dtype in product(CODECS, (1, 3, 127, 1029), SUMMABLE):
        codec, inputs = parse_codec(name), _inputs(group.world_size, num_elems, dtype)
        lengths = slices_for(num_elems, group.world_size, codec)
        own = slice(sum(lengths[: group.rank]), sum(lengths[: group.rank + 1]))
        for out_dtype in (None, torch.float32):
            sent_before, x_N = group.bytes_sent, inputs[group.rank].clone()
            got = reduce_scatter(group, x_N, codec, out_dtype)
            assert group.bytes_sent - sent_before == reduce_scatter_bytes(
                group.rank, group.world_size, num_elems, x_N.element_size(), codec
            )
            assert torch.equal(x_N, inputs[group.rank])
            assert got.dtype == (out_dtype or dtype) and got.shape == (lengths[group.rank],)
            sum_N, error_N = quantized_sum_bound(inputs, codec)
            if out_dtype is None:
                error_N = quantized_total_bound(inputs, sum_N, error_N, parse_codec("none"))
            assert (_error(got, inputs, own) <= error_N[own]).all(), (name, num_elems, dtype)
            results.append(_digest(got))
    return results


def _error(got: Tensor, inputs: list[Tensor], own: slice) -> Tensor:
    return (got.double() - torch.stack([x.double() for x in inputs]).sum(0)[own]).abs()


def _gather_to_root(group: Group) -> None:
    last = group.world_size - 1
    for sizes in (
        [(5 * rank + 3) % 7 for rank in range(group.world_size)],
        [8] * group.world_size,
        [17 * (rank == last) for rank in range(group.world_size)],
    ):
        messages = [torch.arange(size, dtype=torch.uint8) + 10 * rank for rank, size in enumerate(sizes)]
        sent_before = group.bytes_sent
        received = gather_to_root(group, messages[group.rank], sizes)
        assert group.bytes_sent - sent_before == gather_to_root_bytes(group.rank, sizes)
        if group.rank != 0:
            assert received is None
        else:
            assert received is not None
            assert all(torch.equal(got, want) for got, want in zip(received, messages, strict=True)), sizes


def _broadcast(group: Group) -> None:
    for dtype, shape in product(
        (torch.float32, torch.bfloat16, torch.int64, torch.bool), ((), (3, 5), (0,), (100_003,))
    ):
        for root in range(group.world_size):
            want = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(root)).to(dtype)
            sent_before = group.bytes_sent
            got = broadcast(group, want if group.rank == root else torch.zeros_like(want), root)
            assert torch.equal(got, want) and got.shape == want.shape and got.dtype == dtype
            assert group.bytes_sent - sent_before == broadcast_bytes(
                group.rank, group.world_size, want.numel(), want.element_size(), root
            )


def _sparse(group: Group) -> None:
    for counts in ([0] * 8, [0, 5, 1000, 1, 0, 7, 3, 2], [3] * 8):
        for index_dtype, dtype in product((torch.int32, torch.int64), SUMMABLE):
            pairs = [
                (torch.arange(count, dtype=index_dtype) * 3 + rank, torch.full((count,), rank + 0.5, dtype=dtype))
                for rank, count in enumerate(counts[: group.world_size])
            ]
            indices, values = pairs[group.rank]
            sent_before = group.bytes_sent
            received = sparse_all_gather(group, indices, values)
            assert group.bytes_sent - sent_before == sparse_all_gather_bytes(
                group.world_size, len(indices), indices.element_size(), values.element_size()
            )
            assert len(received) == group.world_size
            for (got_i, got_v), (want_i, want_v) in zip(received, pairs, strict=True):
                assert torch.equal(got_i, want_i) and torch.equal(got_v, want_v)
                assert got_i.dtype == index_dtype and got_v.dtype == dtype


def _counts(group: Group) -> None:
    """Each op is in the ledger, with what it would have sent unquantized."""
    group.ledger.counters = Counters()  # without those of opening the group
    x = torch.ones(128 * group.world_size, dtype=torch.bfloat16)
    int8 = parse_codec("int8")
    all_gather(group, x)
    reduce_scatter(group, x)
    reduce_scatter(group, x, int8)
    broadcast(group, x, 1)
    sparse_all_gather(group, torch.arange(3), torch.ones(3))
    others, mine = (
        group.world_size - 1,
        {(c.op, c.algorithm): c for c in group.ledger.counters.counts()},
    )
    assert list(mine) == [
        ("all_gather", "direct"),
        ("reduce_scatter", "direct"),
        ("reduce_scatter", "int8"),
        ("broadcast", "direct"),
        ("sparse_all_gather", "direct"),
    ]
    for op, exact_bytes in (("all_gather", others * x.nbytes), ("reduce_scatter", others * 256)):
        assert mine[op, "direct"].bytes_sent == mine[op, "direct"].exact_bytes == exact_bytes
    assert mine["reduce_scatter", "int8"].exact_bytes == others * 256
    assert mine["reduce_scatter", "int8"].bytes_sent == others * 256 * 8.25 / 16
    assert group.ledger.current() is None


@pytest.fixture(scope="module")
def in_process() -> list[list[str]]:
    return run_in_process(3, _all)


def test_every_collective_keeps_its_word(runner: Runner, in_process: list[list[str]]) -> None:
    """And results are the same bits over every transport."""
    assert runner.run(_all) == in_process


def _all(group: Group) -> list[str]:
    """Check each collective; return digests of this rank's sums."""
    _gather_each_kind(group)
    _gather_transposed(group)
    _broadcast(group)
    _gather_to_root(group)
    _sparse(group)
    return _scatter(group)


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_any_number_of_ranks(world_size: int) -> None:
    run_in_process(world_size, _all)


def test_counts_what_it_sends(runner: Runner) -> None:
    runner.run(_counts)


def test_refuses_what_it_cannot_do() -> None:
    [group] = in_process_groups(1)
    with pytest.raises(TypeError, match="got torch.float64; convert them first"):
        reduce_scatter(group, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="root must be 0 to 0, got 1"):
        broadcast(group, torch.zeros(3), 1)
    with pytest.raises(TypeError, match="indices must be torch.int32 or torch.int64, got torch.uint8"):
        sparse_all_gather(group, torch.zeros(3, dtype=torch.uint8), torch.zeros(3))
    with pytest.raises(ValueError, match="one-dimensional and of equal length"):
        sparse_all_gather(group, torch.zeros(3, dtype=torch.int64), torch.zeros(4))
