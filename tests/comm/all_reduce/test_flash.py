"""Flash AllReduce: the paper's counts of bytes, rounds and quantizations; errors it may and may not make."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import preset_names, split_name
from tightwire.comm.codec.codec import Carried, Codec, Feedback, parse_codec
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.protocols import Transport
from tightwire.kernels import block_quant
from tightwire.kernels.spec.block_format import BlockFormat


def _effective_bits(name: str) -> float:
    """Bits an element takes on the wire, codes and metadata, on average over both legs (comm.md, section 1)."""
    return int(name.removeprefix("flash-int")[0]) + 0.25


class CountingTransport:
    """Passes everything on to ``transport`` and counts calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if not callable(found):
            return found

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return found(*args)

        return counted


def _inputs(world_size: int, num_elems: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(world_size)
    return list(torch.randn(world_size, num_elems, generator=generator).to(dtype))


def _reduce(group: Group, name: str, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """The sum, the bound on its error, and the bytes sent."""
    all_reduce = make_all_reduce(name, group)
    result = all_reduce(inputs[group.rank])
    return result, all_reduce.max_error(inputs), group.bytes_sent


def _error(result: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    return (result.double() - torch.stack([x.double() for x in inputs]).sum(0)).abs()


def _rounds(group: Group, name: str, num_elems: int) -> Counter[str]:
    counting = CountingTransport(group.transport)
    make_all_reduce(name, replace(group, transport=counting))(torch.ones(num_elems))  # pyright: ignore[reportArgumentType]
    return counting.calls


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", preset_names())
def test_volume_of_table_1(name: str, world_size: int) -> None:
    num_elems = 128 * 8 * 3
    for _, _, sent in run_in_process(world_size, _reduce, name, _inputs(world_size, num_elems)):
        assert sent == 2 * (world_size - 1) / world_size * num_elems * _effective_bits(name) / 8


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_two_rounds_whatever_the_number_of_ranks(world_size: int) -> None:
    for calls in run_in_process(world_size, _rounds, "flash-int8", 1000):
        assert calls == {"exchange": 1, "gather": 1}
    for calls in run_in_process(world_size, _rounds, "ring", 1000):
        assert calls == {"shift": 2 * (world_size - 1)}


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_two_quantizations_whatever_the_number_of_ranks(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank quantizes each of its numbers once, and each number's sum is quantized once, by one rank."""
    num_elems = 5000
    encoded: list[int] = []
    reduced: list[int] = []
    encode, decode_reduce_encode = block_quant.encode, block_quant.decode_reduce_encode

    def counting_encode(x_N: Tensor, *args: Any) -> Tensor:
        encoded.append(x_N.numel())
        return encode(x_N, *args)

    def counting_reduce(bufs: list[Tensor], fmt: Any, out_fmt: Any, num_elems: int, **rest: Any) -> Tensor:
        reduced.append(num_elems)
        return decode_reduce_encode(bufs, fmt, out_fmt, num_elems, **rest)

    monkeypatch.setattr(block_quant, "encode", counting_encode)
    monkeypatch.setattr(block_quant, "decode_reduce_encode", counting_reduce)

    def reduce(group: Group) -> None:
        all_reduce = make_all_reduce("flash-int4", group)
        group.transport.barrier()
        encoded.clear()  # of what it tried its kernels with
        reduced.clear()
        group.transport.barrier()
        all_reduce(torch.ones(num_elems))

    run_in_process(world_size, reduce)

    assert sum(encoded) == world_size * num_elems
    assert sum(reduced) == num_elems


@pytest.mark.parametrize(
    ("name", "coarser"), [("flash-int8-plain", "flash-int6-plain"), ("flash-int5-plain", "flash-int4-plain")]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_coarser_codec_breaks_the_bound(name: str, coarser: str, world_size: int) -> None:
    inputs = _inputs(world_size, 5000)
    (fine, bound, _), *_ = run_in_process(world_size, _reduce, name, inputs)
    (coarse, _, _), *_ = run_in_process(world_size, _reduce, coarser, inputs)
    assert (_error(fine, inputs) <= bound).all()
    assert (_error(coarse, inputs) > bound).any()


def test_no_result_widens_its_own_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound knows what the sum should be, not only what came out of a codec that is broken."""
    inputs = _inputs(2, 1000)
    [group, _] = in_process_groups(2)
    bound = make_all_reduce("flash-int8", group).max_error(inputs)
    decode = Codec.decode
    monkeypatch.setattr(Codec, "decode", lambda *args: decode(*args).mul_(64))
    assert (make_all_reduce("flash-int8", group).max_error(inputs) < 2 * bound).all()


def test_six_bits_in_both_legs_are_better_than_four_and_eight() -> None:
    inputs = _inputs(4, 4 * 128 * 40)
    (published, _, published_bytes), *_ = run_in_process(4, _reduce, "flash-int6-plain", inputs)
    (uniform, _, uniform_bytes), *_ = run_in_process(4, _reduce, "flash:int6,int6", inputs)
    assert uniform_bytes == published_bytes
    assert _error(uniform, inputs).square().mean() < _error(published, inputs).square().mean()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_none_spoils_its_group_and_no_other(bad: float) -> None:
    inputs = _inputs(3, 1000)
    inputs[1][300] = bad  # in the group of elements 256 to 383
    for result, bound, _ in run_in_process(3, _reduce, "flash-int4-plain", inputs):
        assert result[256:384].isnan().all() and bound[256:384].isinf().all()
        kept = torch.cat([result[:256], result[384:]])
        assert kept.isfinite().all()


def test_large_bfloat16_numbers_are_ordinary_ones() -> None:
    inputs = [x * 1e6 for x in _inputs(3, 1000)]
    for result, bound, _ in run_in_process(3, _reduce, "flash-int8", inputs):
        assert result.isfinite().all() and (_error(result, inputs) <= bound).all()


def test_a_float16_sum_beyond_its_range_is_infinite_where_it_is_beyond() -> None:
    inputs = [torch.full((200,), 1.0, dtype=torch.float16) for _ in range(3)]
    for x in inputs:
        x[5] = 60_000
    for result, bound, _ in run_in_process(3, _reduce, "flash-int8", inputs):
        assert result[5] == torch.inf and bound[5] == torch.inf
        assert result[128:].eq(3).all()


def test_without_codecs_it_is_two_shot() -> None:
    inputs = _inputs(3, 5003)
    flash = run_in_process(3, _reduce, "flash:none,none", inputs)
    two_shot = run_in_process(3, _reduce, "two-shot", inputs)
    for (got, got_bound, got_bytes), (want, want_bound, want_bytes) in zip(flash, two_shot, strict=True):
        assert torch.equal(got, want) and got_bytes == want_bytes
        assert torch.allclose(got_bound, want_bound, rtol=1e-9, atol=1e-30)


def test_says_whether_it_is_lossless() -> None:
    [group] = in_process_groups(1)
    assert make_all_reduce("flash:none,none", group).lossless
    assert not make_all_reduce("flash:none,int8", group).lossless
    assert not make_all_reduce("flash:int8,none", group).lossless


def test_a_rank_alone_quantizes_nothing() -> None:
    x = _inputs(1, 1000)[0]
    [(result, bound, sent)] = run_in_process(1, _reduce, "flash-int4", [x])
    assert torch.equal(result, x) and sent == 0 and bound.eq(0).all()


_FEEDBACK = "flash:int3-g32-had-ef,int3-g32-had-ef"


def _sums_with_feedback(group: Group, name: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of S messages, and what this rank has carried at the end."""
    all_reduce, feedback = make_all_reduce(name, group), Feedback()
    sums = [all_reduce(x_N, "prefill", "", feedback) for x_N in inputs[:, group.rank]]
    num_elems, carried = inputs.shape[2], torch.zeros(inputs.shape[2])
    for leg, codec_name in zip(("reduce", "gather"), split_name(name)[1], strict=True):
        codec = parse_codec(codec_name, feedback=True)
        lost_M = feedback.carried(f"prefill {leg}", codec, num_elems, inputs.device)
        if lost_M is not None and codec.format is not None:
            carried += _turned_back(lost_M.float(), codec.format)[:num_elems]
    return torch.stack(sums), carried


def _turned_back(lost_M: Tensor, fmt: BlockFormat) -> Tensor:
    """Errors as those of a message's numbers, which the format may rotate."""
    if not fmt.hadamard:
        return lost_M
    places = range(fmt.group_elems)
    signs_EE = torch.tensor([[1.0 - 2.0 * ((i & j).bit_count() % 2) for i in places] for j in places])
    return (lost_M.view(-1, fmt.group_elems) @ signs_EE / fmt.group_elems).view(-1)


@pytest.mark.parametrize("name", [_FEEDBACK, "flash:int4-ef,none", "flash:none,int4-g64-ef"])
def test_feedback_leaves_only_the_latest_error_in_the_total(name: str) -> None:
    inputs = torch.randn(6, 3, 1000)
    seen = run_in_process(3, _sums_with_feedback, name, inputs)
    sums, carried = seen[0][0], torch.stack([carried for _, carried in seen]).sum(0)
    assert all(torch.equal(sums, other) for other, _ in seen)
    torch.testing.assert_close(sums.sum(0) + carried, inputs.sum((0, 1)), atol=0.02, rtol=0)
    [plain, *_] = run_in_process(3, _sums_with_feedback, name.replace("-ef", ""), inputs)
    lost = (plain[0].sum(0) - inputs.sum((0, 1))).square().mean()
    assert carried.square().mean() < lost / 3  # of six equal errors, one


def test_feedback_is_of_one_pass_and_one_kind_of_rows() -> None:
    def sums(group: Group) -> list[Tensor]:
        all_reduce, feedback, x_N = make_all_reduce(_FEEDBACK, group), Feedback(), torch.linspace(-1, 1, 600)
        calls = [
            ("prefill", feedback),
            ("prefill", feedback),
            ("decode", feedback),
            ("prefill", Feedback()),
            ("", None),
        ]
        return [all_reduce(x_N, phase, "", given) for phase, given in calls]

    first, second, *others = run_in_process(2, sums)[0]
    assert not torch.equal(first, second)
    assert all(torch.equal(first, other) for other in others)


def test_feedback_of_a_row_does_not_depend_on_other_rows() -> None:
    inputs = torch.randn(3, 2, 5, 96)
    [all_rows, *_] = run_in_process(2, _sums_with_feedback, _FEEDBACK, inputs.flatten(2))
    [one_row, *_] = run_in_process(2, _sums_with_feedback, _FEEDBACK, inputs[:, :, 3].contiguous())
    assert torch.equal(all_rows[0].view(3, 5, 96)[:, 3], one_row[0])


class _Fused:
    """Stands for a kernel: notes what it was asked."""

    def __init__(self, *, tells_coding: bool) -> None:
        self.tells_coding = tells_coding
        self.asked: list[tuple[str, str]] = []

    def flash(self, x_N: Tensor, reduce_codec: Codec, gather_codec: Codec, carried: Carried) -> Tensor:
        self.asked.append((reduce_codec.name, gather_codec.name))
        return x_N * 2


@pytest.mark.parametrize("tells_coding", [True, False])
def test_a_transports_own_kernel_does_it_all(tells_coding: bool) -> None:
    [group, _] = in_process_groups(2)
    fused: Any = _Fused(tells_coding=tells_coding)
    group.transport.fused = fused
    assert make_all_reduce("flash-int6-plain", group)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    assert fused.asked == [("int4", "int8")]
    assert [count.codec_seconds for count in group.ledger.counters.counts()] == [0.0 if tells_coding else None]


def test_a_kernel_that_encodes_nothing_hides_nothing() -> None:
    [group, _] = in_process_groups(2)
    fused: Any = _Fused(tells_coding=False)
    group.transport.fused = fused
    make_all_reduce("flash:none,none", group)(torch.ones(2, 3))
    assert [count.codec_seconds for count in group.ledger.counters.counts()] == [0.0]
