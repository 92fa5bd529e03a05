"""One contract for every AllReduce over every transport: the seam's promises (comm/protocols.py), checked on each rank.

In process, where a call is cheap, every algorithm meets world sizes 1 to 5 and 8 with lengths up to 4096 (``CASES``).
Between processes every algorithm, with codecs of a few kinds, runs over gloo with two and three ranks, over shared memory
with two, three, five and eight, over NCCL's calls with two and three, behind a throttled link with two; all codecs give
the bits there that they give in process. A million elements and three are summed in bfloat16 only, by three ranks in
process and by two over shared memory.

"nccl-calls" is the NCCL transport over a gloo group, "throttled" a transport behind an emulated link (tests/harness.py):
NCCL itself needs a GPU per rank.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch
from harness import Over, Runner
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce, parse_all_reduce
from tightwire.comm.all_reduce.names import all_reduce_names, preset_names
from tightwire.comm.group.group import Group
from tightwire.kernels.spec.block_format import PLANES

NAMES = [*all_reduce_names(), "flash:none,int4-g32", "flash:int8-g64-had,none"]
# One of the presets, which are names of codecs that the others have too.
NAMES_OF_KINDS = [name for name in NAMES if name not in preset_names() or name == "flash-int8"]
LARGE = 1_000_003
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# All dtypes with part of a codec's group and with many groups; one or two with lengths that have less to go wrong.
IN_ALL_DTYPES = list(product((127, 4096), DTYPES))
CASES = [
    (0, torch.float32),
    (1, torch.bfloat16),
    (7, torch.float32),
    (7, torch.float16),
    (128, torch.bfloat16),
    *IN_ALL_DTYPES,
]


IN_PROCESS = [Over("in-process", world_size) for world_size in (1, 2, 3, 4, 5, 8)]
PROCESSES = [
    *(Over("gloo", world_size) for world_size in (2, 3)),
    *(Over("sockets", world_size) for world_size in (2, 3)),
    *(Over("shared-memory", world_size) for world_size in (2, 3, 5, 8)),
    *(Over("nccl-calls", world_size) for world_size in (2, 3)),
    Over("throttled", 2),
]
ON_NODES = [
    *(Over("in-process", *shape) for shape in ((3, 3), (4, 2), (6, 3), (6, 2), (8, 2))),
    Over("gloo", 2, 2),
    Over("sockets", 4, 2),
    Over("shared-memory", 4, 2),
]
HIERARCHICAL = ["hierarchical", "hierarchical:int8", "hierarchical:int5-g32-had"]

# Names whose sums must not depend on where an element stands when there are more than two ranks: what makes a request's
# text independent of the batch it runs in. Two ranks' sum commutes, so there every exact algorithm has the property.
IN_RANK_ORDER = ["auto", "one-shot", "two-shot", "hierarchical"]
SEND_ALL = ["one-shot"]  # their whole input, to every rank
EXACT = [name for name in NAMES if parse_all_reduce(name).lossless]


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(request.param)
    yield runner
    runner.close()


def over(*choices: Over) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("runner", choices, ids=str, indirect=True)


def _inputs(world_size: int, num_elems: int, dtype: torch.dtype) -> list[Tensor]:
    """All ranks' inputs, of magnitudes from 2^-6 to 2^6, so that rounding shows."""
    generator = torch.Generator().manual_seed(num_elems)
    scales = torch.exp2(torch.randint(-6, 7, (world_size, num_elems), generator=generator).float())
    return list((torch.randn(world_size, num_elems, generator=generator) * scales).to(dtype))


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _check_contract(group: Group, name: str, cases: Sequence[tuple[int, torch.dtype]]) -> list[tuple[str, str]]:
    """Call and check on this rank; (case, digest of the result) for comparing ranks. Rank 0 checks the error bound."""
    all_reduce = make_all_reduce(name, group)
    digests, results = [], []
    for num_elems, dtype in cases:
        case = f"{name} {num_elems} {dtype}"
        inputs = _inputs(group.world_size, num_elems, dtype)
        # The input is part of a larger tensor, at an address that suits its dtype and nothing wider.
        whole = torch.full((num_elems + 5,), 7.0, dtype=dtype)
        x = whole[3 : 3 + num_elems].copy_(inputs[group.rank])
        sent_before = group.bytes_sent

        result = all_reduce(x)

        sent = group.bytes_sent - sent_before
        assert sent == all_reduce.wire_bytes(num_elems, x.element_size()), f"{case}: sent {sent}"
        assert result.shape == x.shape and result.dtype == dtype and result.is_contiguous(), case
        assert num_elems == 0 or result.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr(), case
        digests.append((case, _digest(result)))
        results.append(result)
        assert torch.equal(all_reduce(x), result), f"{case}: the second run differs"
        assert torch.equal(x, inputs[group.rank]), f"{case}: input changed"
        assert whole[:3].eq(7).all() and whole[-2:].eq(7).all(), f"{case}: wrote around the input"
        if group.rank == 0 and num_elems:
            exact = torch.stack([i.double() for i in inputs]).sum(0)
            excess = (result.double() - exact).abs() - all_reduce.max_error(inputs)
            assert excess.max() <= 0, f"{case}: {excess.max()} above the bound"
    kept = [(case, _digest(result)) for (case, _), result in zip(digests, results, strict=True)]
    assert kept == digests, f"{name}: later calls wrote into an earlier result"
    return digests


def _assert_contract(runner: Runner, name: str, cases: Sequence[tuple[int, torch.dtype]] = CASES) -> None:
    per_rank = runner.run(_check_contract, name, cases)
    assert len(per_rank[0]) == len(cases)
    for rank, digests in enumerate(per_rank):
        assert digests == per_rank[0], f"rank {rank} holds other bits than rank 0"


@over(*IN_PROCESS)
@pytest.mark.parametrize("name", NAMES)
def test_keeps_the_contract(runner: Runner, name: str) -> None:
    _assert_contract(runner, name)


@over(*PROCESSES)
@pytest.mark.parametrize("name", NAMES_OF_KINDS)
def test_keeps_the_contract_between_processes(runner: Runner, name: str) -> None:
    _assert_contract(runner, name)


@over(*ON_NODES)
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_keeps_the_contract_on_nodes(runner: Runner, name: str) -> None:
    _assert_contract(runner, name)


@over(Over("in-process", 3), Over("shared-memory", 2))
@pytest.mark.parametrize("name", NAMES_OF_KINDS)
def test_keeps_the_contract_with_a_million_elements(runner: Runner, name: str) -> None:
    _assert_contract(runner, name, [(LARGE, torch.bfloat16)])


@over(Over("gloo", 3), Over("sockets", 3), Over("shared-memory", 2), Over("shared-memory", 5), Over("nccl-calls", 3))
def test_the_same_bits_over_every_transport(runner: Runner) -> None:
    """A kernel that does a whole AllReduce rounds where the messages' algorithm does; only libraries add as they like."""
    in_process = Runner(Over("in-process", runner.over.world_size))
    for name in NAMES:
        if name != "native":
            got, want = (ranks.run(_check_contract, name, IN_ALL_DTYPES)[0] for ranks in (runner, in_process))
            assert got == want, name


CODECS = [
    f"int{bits}{group}{symmetric}{rotated}"
    for bits, group, symmetric, rotated in product(PLANES, ("", "-g64", "-g32"), ("", "-sym"), ("", "-had"))
]


@over(Over("in-process", 3))
def test_flash_keeps_the_contract_with_every_codec(runner: Runner) -> None:
    for codec in [*CODECS, "fp8"]:
        _assert_contract(runner, f"flash:{codec},{codec}", [(size, torch.bfloat16) for size in (1, 127, 1029)])


def _check_shapes(group: Group, name: str) -> None:
    all_reduce = make_all_reduce(name, group)
    base = torch.arange(24.0) * (group.rank + 1)
    for x in (
        base[0],
        base.view(4, 6),
        base.view(4, 6).t(),
        base[::2],
        base.view(2, 3, 4)[:, 1:, ::3],
        base[:1].expand(5),
        base.view(4, 6)[:0],
    ):
        before = x.clone()
        result = all_reduce(x)
        assert result.is_contiguous() and result.shape == x.shape
        assert torch.equal(result, all_reduce(x.contiguous())), f"{name} {tuple(x.shape)} {x.stride()}"
        assert torch.equal(x, before), f"{name} {tuple(x.shape)} {x.stride()}: input changed"


@over(Over("gloo", 2), Over("sockets", 2), Over("shared-memory", 3), Over("nccl-calls", 3), *IN_PROCESS[:4])
@pytest.mark.parametrize("name", NAMES_OF_KINDS)
def test_takes_any_shape_and_layout(runner: Runner, name: str) -> None:
    runner.run(_check_shapes, name)


def _sums_of_one_value(group: Group, name: str) -> set[tuple[torch.dtype, float]]:
    """Each rank holds one value at every place of tensors of several sizes; the sums that come out."""
    all_reduce = make_all_reduce(name, group)
    seen = set()
    for num_elems, dtype in product((1, 7, 128, 5003), DTYPES):
        value = torch.tensor([0.1, 3.3, 100.7, -0.0123][group.rank], dtype=dtype)
        seen.update((dtype, number) for number in all_reduce(value.repeat(num_elems)).tolist())
    return seen


@over(Over("gloo", 2), Over("shared-memory", 4), Over("shared-memory", 4, 2), Over("nccl-calls", 3))
def test_an_elements_sum_does_not_depend_on_its_place(runner: Runner) -> None:
    for name in EXACT if runner.over.world_size == 2 else IN_RANK_ORDER:
        for seen in runner.run(_sums_of_one_value, name):
            assert len(seen) == len(DTYPES), f"{name}: {seen}"


def _check_rows(group: Group, name: str) -> None:
    """Rows that are whole codec groups: the same sums alone, together, and in another order."""
    all_reduce = make_all_reduce(name, group)
    rows_RD = torch.randn(11, 256, generator=torch.Generator().manual_seed(group.rank)).bfloat16()
    together_RD = all_reduce(rows_RD)
    assert torch.equal(all_reduce(rows_RD.flip(0)), together_RD.flip(0)), name
    for row in (0, 4, 10):
        assert torch.equal(all_reduce(rows_RD[row]), together_RD[row]), f"{name}: row {row}"


@over(Over("in-process", 2), Over("in-process", 3), Over("in-process", 8, 4), Over("shared-memory", 3))
def test_a_row_does_not_depend_on_the_rows_beside_it(runner: Runner) -> None:
    for name in [*IN_RANK_ORDER, *HIERARCHICAL, *(name for name in NAMES if name not in EXACT)]:
        runner.run(_check_rows, name)


def _count(group: Group) -> None:
    for name in NAMES:
        if name == "auto":
            continue  # it records the algorithm it chose
        all_reduce = make_all_reduce(name, group)
        all_reduce(torch.ones(1000), "prefill")
        all_reduce(torch.ones(10, dtype=torch.bfloat16), "decode")
        all_reduce(torch.ones(10, dtype=torch.bfloat16), "decode")
        counts = {c.phase: c for c in group.ledger.counters.counts() if c.algorithm == name}
        assert (counts["prefill"].op, counts["prefill"].calls, counts["decode"].calls) == ("all_reduce", 1, 2)
        assert counts["prefill"].bytes_sent == all_reduce.wire_bytes(1000, 4)
        assert counts["decode"].bytes_sent == 2 * all_reduce.wire_bytes(10, 2)
        exact = all_reduce if all_reduce.lossless else make_all_reduce("two-shot", group)
        assert counts["prefill"].exact_bytes == exact.wire_bytes(1000, 4)
        assert counts["decode"].exact_bytes == 2 * exact.wire_bytes(10, 2)
        assert counts["decode"].seconds > 0
        codec_seconds = counts["prefill"].codec_seconds
        assert codec_seconds is not None
        assert codec_seconds == 0 if all_reduce.lossless else 0 < codec_seconds < counts["prefill"].seconds
        assert group.ledger.current() is None


@over(Over("gloo", 3), Over("sockets", 3), Over("shared-memory", 3))
def test_every_algorithm_is_in_the_ledger(runner: Runner) -> None:
    runner.run(_count)


def _wire_bytes(group: Group, name: str) -> int:
    return make_all_reduce(name, group).wire_bytes(6144, 2)


@over(*(Over("in-process", world_size) for world_size in (2, 3, 4, 8)))
@pytest.mark.parametrize("name", ["auto", "native", "ring", "one-shot", "two-shot", "hierarchical", "flash:none,none"])
def test_sends_a_rings_bytes_when_ranks_divide_the_elements(runner: Runner, name: str) -> None:
    world_size = runner.over.world_size
    if name == "auto":
        allowed = {(world_size - 1) * 6144 * 2, 2 * (world_size - 1) / world_size * 6144 * 2}
    else:
        share = world_size - 1 if name in SEND_ALL else 2 * (world_size - 1) / world_size
        allowed = {share * 6144 * 2}
    assert set(runner.run(_wire_bytes, name)) <= allowed


@over(*(Over("in-process", world_size) for world_size in (2, 3, 4, 8)))
@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXACT])
def test_sends_a_rings_share_of_encoded_bytes_when_ranks_divide_the_groups(runner: Runner, name: str) -> None:
    world_size = runner.over.world_size
    per_leg = [(world_size - 1) / world_size * codec.wire_bytes(6144, 2) for codec in parse_all_reduce(name).codecs]
    assert set(runner.run(_wire_bytes, name)) == {sum(per_leg)}
