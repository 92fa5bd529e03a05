"""One contract for every AllReduce over every transport: the seam's promises (comm/protocols.py), checked on each rank.

"nccl-calls" is the NCCL transport over a gloo group (tests/harness.py): NCCL itself needs a GPU per rank.
"""

import hashlib
from functools import partial
from itertools import product

import pytest
import torch
from harness import run_in_process, run_nccl_calls, run_ranks
from torch import Tensor

from tightwire.comm.group import Group
from tightwire.comm.registry import ALL_REDUCE, make_all_reduce

NAMES = sorted(ALL_REDUCE)
SIZES = (0, 1, 7, 127, 128, 4096, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OVER = {
    "gloo": (run_ranks, (1, 2, 3, 4)),
    "nccl-calls": (run_nccl_calls, (2, 3)),
    "in-process": (run_in_process, (1, 2, 3, 4, 5, 8)),
    "shared-memory": (partial(run_ranks, shared_memory=True), (2, 3, 4)),
}
TRANSPORTS = [(over, world_size) for over, (_, world_sizes) in OVER.items() for world_size in world_sizes]

# Names whose sums must not depend on where an element stands, by world size: what makes a request's text independent
# of the batch it runs in. Two ranks' sum commutes, so there every algorithm has the property.
IN_RANK_ORDER = ["auto", "one-shot", "two-shot"]
PLACE_INDEPENDENT = {2: NAMES, 3: IN_RANK_ORDER, 4: IN_RANK_ORDER}


def _inputs(world_size: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    """All ranks' inputs, of magnitudes from 2^-6 to 2^6, so that rounding shows."""
    generator = torch.Generator().manual_seed(num_elems)
    scales = torch.exp2(torch.randint(-6, 7, (world_size, num_elems), generator=generator).float())
    return list((torch.randn(world_size, num_elems, generator=generator) * scales).to(dtype))


def _check_contract(group: Group, name: str) -> list[tuple[str, str]]:
    all_reduce = make_all_reduce(name, group)
    digests = []
    for num_elems, dtype in product(SIZES, DTYPES):
        case = f"{name} {num_elems} {dtype}"
        inputs = _inputs(group.world_size, num_elems, dtype)
        x = inputs[group.rank].clone()
        sent_before = group.transport.bytes_sent

        result = all_reduce(x)

        sent = group.transport.bytes_sent - sent_before
        assert sent == all_reduce.wire_bytes(num_elems, x.element_size()), f"{case}: sent {sent}"
        assert result.shape == x.shape and result.dtype == dtype, case
        assert torch.equal(x, inputs[group.rank]), f"{case}: input changed"
        assert num_elems == 0 or result.data_ptr() != x.data_ptr(), f"{case}: result is the input"
        exact = torch.stack([i.double() for i in inputs]).sum(0)
        excess = (result.double() - exact).abs() - all_reduce.max_error(inputs)
        assert num_elems == 0 or excess.max() <= 0, f"{case}: {excess.max()} above the bound"
        assert torch.equal(all_reduce(x), result), f"{case}: the second run differs"
        digests.append((case, hashlib.sha256(result.view(torch.uint8).numpy().tobytes()).hexdigest()))
    return digests


def _check_shapes(group: Group, name: str) -> None:
    all_reduce = make_all_reduce(name, group)
    total = sum(range(1, group.world_size + 1))
    base = torch.arange(24.0)
    for x in (
        base[0],
        base.view(4, 6),
        base.view(4, 6).t(),
        base[::2],
        base.view(2, 3, 4)[:, 1:, ::3],
        base[:1].expand(5),
    ):
        mine = x * (group.rank + 1) if x.is_contiguous() else _like(x, group.rank + 1)
        result = all_reduce(mine)
        assert result.is_contiguous()
        assert torch.equal(result, x * total), f"{name} {tuple(x.shape)} {x.stride()}"


def _like(x: Tensor, factor: int) -> Tensor:
    """``x * factor`` with the strides of ``x``."""
    scaled = torch.empty_strided(x.shape, x.stride())
    if 0 in x.stride():
        scaled = torch.empty(1).expand(x.shape)
        scaled[:1].copy_(x[:1] * factor)
        return scaled
    return scaled.copy_(x * factor)


def _sums_of_one_value(group: Group, name: str) -> set[tuple[torch.dtype, float]]:
    """Each rank holds one value at every place of tensors of several sizes; the sums that come out."""
    all_reduce = make_all_reduce(name, group)
    seen = set()
    for num_elems, dtype in product((1, 7, 128, 5003), DTYPES):
        value = torch.tensor([0.1, 3.3, 100.7, -0.0123][group.rank], dtype=dtype)
        seen.update((dtype, number) for number in all_reduce(value.repeat(num_elems)).tolist())
    return seen


def _count(group: Group) -> None:
    for name in NAMES:
        if name == "auto":
            continue  # it records the algorithm it chose
        all_reduce = make_all_reduce(name, group)
        group.ledger.phase = "prefill"
        all_reduce(torch.ones(1000))
        group.ledger.phase = "decode"
        all_reduce(torch.ones(10, dtype=torch.bfloat16))
        all_reduce(torch.ones(10, dtype=torch.bfloat16))
        counts = {c.phase: c for c in group.ledger.counts() if c.algorithm == name}
        assert (counts["prefill"].op, counts["prefill"].calls, counts["decode"].calls) == ("all_reduce", 1, 2)
        assert counts["prefill"].bytes_sent == all_reduce.wire_bytes(1000, 4)
        assert counts["decode"].bytes_sent == 2 * all_reduce.wire_bytes(10, 2)
        assert counts["decode"].seconds > 0
        assert group.ledger.current() is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("over", "world_size"), TRANSPORTS)
def test_keeps_the_contract(over: str, world_size: int, name: str) -> None:
    run, _ = OVER[over]
    per_rank = run(world_size, _check_contract, name)
    assert len(per_rank[0]) == len(SIZES) * len(DTYPES)
    for rank, digests in enumerate(per_rank):
        assert digests == per_rank[0], f"rank {rank} holds other bits than rank 0"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("over", "world_size"), [("gloo", 2), ("shared-memory", 2), ("nccl-calls", 3), ("in-process", 1), ("in-process", 4)]
)
def test_takes_any_shape_and_layout(over: str, world_size: int, name: str) -> None:
    run, _ = OVER[over]
    run(world_size, _check_shapes, name)


@pytest.mark.parametrize("world_size", PLACE_INDEPENDENT)
def test_an_elements_sum_does_not_depend_on_its_place(world_size: int) -> None:
    for name in PLACE_INDEPENDENT[world_size]:
        for seen in run_ranks(world_size, _sums_of_one_value, name):
            assert len(seen) == len(DTYPES), f"{name}: {seen}"


def test_every_algorithm_is_in_the_ledger() -> None:
    run_ranks(3, _count)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_sends_a_rings_bytes_when_ranks_divide_the_elements(name: str, world_size: int) -> None:
    share = world_size - 1 if name in ("one-shot", "auto") else 2 * (world_size - 1) / world_size
    want = [share * 6144 * 2] * world_size
    assert run_in_process(world_size, _wire_bytes, name) == want


def _wire_bytes(group: Group, name: str) -> int:
    return make_all_reduce(name, group).wire_bytes(6144, 2)
