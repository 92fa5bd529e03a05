import math
import re
from functools import cache
from itertools import product

import pytest
import torch
from helpers.kernels.block_data import all_formats, format_id
from torch import Tensor

from tightwire.comm.all_reduce.names import split_name
from tightwire.comm.codec.codec import SUMMABLE, Codec, Feedback, parse_codec, slice_lengths, sum_in_rank_order
from tightwire.kernels.spec.block_format import BlockFormat

# --- names ----------------------------------------------------------------------------------------------------------------


def _name(fmt: BlockFormat) -> str:
    base = "fp8" if fmt.float8 else f"int{fmt.bits}"
    group = "" if fmt.group_elems == 128 else f"-g{fmt.group_elems}"
    return base + group + "-sym" * fmt.symmetric + "-had" * fmt.hadamard


@pytest.mark.parametrize("fmt", all_formats(), ids=format_id)
def test_every_format_has_a_name(fmt: BlockFormat) -> None:
    assert parse_codec(_name(fmt)) == Codec(_name(fmt), fmt)


def test_only_sums_over_ranks_have_error_feedback() -> None:
    assert parse_codec("int4-g64-had-ef", feedback=True) == Codec(
        "int4-g64-had-ef", BlockFormat(bits=4, group_elems=64, hadamard=True), feedback=True
    )
    with pytest.raises(ValueError, match="only sums of flash have error feedback"):
        parse_codec("int4-ef")
    with pytest.raises(ValueError, match="hierarchical has no error feedback"):
        split_name("hierarchical:int4-ef")


def test_encoding_carries_what_it_lost_before() -> None:
    codec = parse_codec("int4-g32-ef", feedback=True)
    carried_M = Feedback().carried("reduce", codec, 70, torch.device("cpu"))
    assert carried_M is not None and carried_M.shape == (128,) and carried_M.dtype == torch.bfloat16
    x_2N, decoded_N, carried_M = torch.randn(2, 70), torch.zeros(70), carried_M[:96]
    for x_N in x_2N:
        codec.decode_add(codec.encode(x_N, carried_M=carried_M), decoded_N, torch.float32)
    torch.testing.assert_close(decoded_N + carried_M[:70], x_2N.sum(0), atol=2e-3, rtol=0)
    assert (carried_M[:70].abs() <= codec.max_error(x_2N[1] + carried_M[:70]) * 1.2).all()


def test_errors_are_kept_by_leg_and_rotation() -> None:
    feedback = Feedback()
    names = ("int4-g64-sym-had-ef", "int8-g64-had-ef", "int4-g32-had-ef", "int4-g64-ef", "int8-ef", "int8-had")

    def kept(leg: str, name: str) -> Tensor | None:
        return feedback.carried(leg, parse_codec(name, feedback=True), 128, torch.device("cpu"))

    rotated, also_rotated, other_groups, plain, also_plain, without = (kept("reduce", name) for name in names)
    assert rotated is also_rotated and plain is also_plain and without is None
    assert len({id(each) for each in (rotated, other_groups, plain, kept("gather", names[0]))}) == 4


def test_the_usual_group_may_be_named() -> None:
    assert parse_codec("int8-g128").format == parse_codec("int8").format


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int1",
        "int9",
        "INT8",
        "int8-g16",
        "fp8-sym",
        "int4-had-sym",
        "none-g32",
        "int4 ",
        "fp4",
    ],
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown codec {name!r}") + ".*a codec is none, fp8, or int8"):
        parse_codec(name)


# --- use ------------------------------------------------------------------------------------------------------------------


def test_none_moves_numbers_as_they_are() -> None:
    codec, x = parse_codec("none"), torch.randn(7).bfloat16()
    buf = codec.encode(x)
    assert buf.data_ptr() == x.data_ptr()
    assert codec.exact
    assert codec.group_elems == 1
    assert codec.wire_bytes(7, 2) == len(buf) == 14
    assert torch.equal(codec.decode(buf, 7, torch.bfloat16), x)
    kept = torch.empty(14, dtype=torch.uint8)
    assert codec.encode(x, kept) is kept
    assert torch.equal(codec.decode(kept, 7, torch.bfloat16, torch.empty_like(x)), x)
    sums = torch.ones(7)
    codec.decode_add(buf, sums, torch.bfloat16)
    assert torch.equal(sums, 1 + x.float())
    assert (codec.max_error(x) == 0).all()


@pytest.mark.parametrize("name", ["int8", "int5-g32-sym", "int3-sym", "fp8-g64", "int4-had"])
def test_quantized_numbers_come_back_within_the_bound(name: str) -> None:
    codec, x = parse_codec(name), torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    buf = codec.encode(x)
    assert not codec.exact
    assert len(buf) == codec.wire_bytes(1000, 2)
    got, bound = codec.decode(buf, 1000, torch.float32), codec.max_error(x)
    assert ((got.double() - x.double()).abs() <= bound).all()
    rounded = codec.decode(buf, 1000, torch.bfloat16)
    assert torch.equal(rounded, got.bfloat16())
    sums = torch.zeros(1000)
    codec.decode_add(buf, sums, torch.bfloat16)
    assert torch.equal(sums, got)


# --- noise ----------------------------------------------------------------------------------------------------------------

_ROWS, _ROW_ELEMS, _RANKS = 256, 4096, 4

# Signal to noise by torch operations in float32, with scales and zeros rounded to the nearest bfloat16 (ours are rounded
# outwards): one pass over Gaussian, Laplace and outlier numbers, then sums of four ranks, encoded twice, of Gaussian and
# of outlier numbers. More noise than half a decibel above it would be a flaw of the codec; so would less.
_SQNR_DB = {
    "int8": (44.5, 42.2, 37.5, 41.5, 34.5),
    "int8-g32": (46.4, 45.0, 43.6, 43.3, 40.5),
    "int8-sym": (43.8, 41.0, 33.2, 40.8, 30.2),
    "fp8": (31.8, 32.1, 37.0, 28.8, 34.0),
    "int6": (32.5, 30.2, 25.4, 29.5, 22.4),
    "int5": (26.3, 24.0, 19.3, 23.3, 16.2),
    "int4": (20.0, 17.7, 12.7, 17.0, 9.7),
    "int4-g32": (22.1, 20.8, 18.9, 19.1, 15.7),
    "int2": (6.0, 3.5, -0.6, 2.3, -4.1),
    "int4-had": (20.0, 20.1, 23.2, 17.0, 20.0),
    "int3-had": (13.4, 13.5, 16.5, 10.3, 13.2),
}


@cache
def _data() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Gaussian of each rank, Laplace, and Gaussian of each rank with 0.8 % of the channels some 20 times as large."""
    generator = torch.Generator().manual_seed(0)
    outliers = torch.randperm(_ROW_ELEMS, generator=generator)[: _ROW_ELEMS // 128]
    scales = torch.ones(_ROW_ELEMS)
    scales[outliers] = torch.exp(0.5 * torch.randn(len(outliers), generator=generator) + math.log(20))
    shape = (_ROWS, _ROW_ELEMS)
    gauss = [torch.randn(shape, generator=generator).view(-1) for _ in range(_RANKS)]
    outlier = [(torch.randn(shape, generator=generator) * scales).view(-1) for _ in range(_RANKS)]
    uniform = torch.rand(_ROWS * _ROW_ELEMS, generator=generator) - 0.5
    return gauss, -uniform.sign() * torch.log1p(-2 * uniform.abs()), outlier


def _through(codec: Codec, x_N: Tensor) -> Tensor:
    return codec.decode(codec.encode(x_N), x_N.numel(), x_N.dtype)


def _one_pass_db(codec: Codec, x_N: Tensor) -> float:
    return _decibels(x_N, _through(codec, x_N))


def _two_step_db(reduce_codec: Codec, gather_codec: Codec, parts: list[Tensor]) -> float:
    """Every rank's part encoded, their sum encoded again."""
    return _decibels(sum_of(parts), _through(gather_codec, sum_of([_through(reduce_codec, part) for part in parts])))


def sum_of(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _decibels(exact: Tensor, got: Tensor) -> float:
    return 10 * math.log10(exact.square().mean().item() / (exact - got).square().mean().item())


@pytest.mark.parametrize("name", list(_SQNR_DB))
def test_noise(name: str) -> None:
    codec = parse_codec(name)
    gauss, laplace, outlier = _data()
    got = [_one_pass_db(codec, x) for x in (gauss[0], laplace, outlier[0])]
    got += [_two_step_db(codec, codec, parts) for parts in (gauss, outlier)]
    assert got == pytest.approx(_SQNR_DB[name], abs=0.5)


@pytest.mark.parametrize(("names", "want"), [(("int4", "int8"), (20.0, 12.7)), (("int8", "int4"), (20.0, 12.6))])
def test_noise_of_four_and_eight_bits_on_the_two_legs(names: tuple[str, str], want: tuple[float, float]) -> None:
    first, second = (parse_codec(name) for name in names)
    gauss, _, outlier = _data()
    assert [_two_step_db(first, second, parts) for parts in (gauss, outlier)] == pytest.approx(want, abs=0.5)


def _parts(num_parts: int, dtype: torch.dtype, num_elems: int = 1013) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_parts)
    return [(torch.randn(num_elems, generator=generator) * 10).to(dtype) for _ in range(num_parts)]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_sum_has_the_bits_of_a_plain_fp32_loop(num_parts: int, dtype: torch.dtype) -> None:
    parts = _parts(num_parts, dtype)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()

    got = sum_in_rank_order(parts)

    assert torch.equal(got, want.to(dtype))
    assert got.data_ptr() not in {part.data_ptr() for part in parts}


def test_16_bit_parts_are_not_rounded_on_the_way() -> None:
    # In bf16 256 + 1 is 256 again; in fp32 the four ones survive until the end.
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    assert sum_in_rank_order(parts).item() == 260.0


def test_slices_are_whole_groups() -> None:
    for num_elems, num_slices, multiple in product((0, 1, 7, 127, 128, 129, 1000, 4096), (1, 2, 3, 8), (1, 32, 128)):
        case = f"{num_elems} in {num_slices} by {multiple}"
        lengths = slice_lengths(num_elems, num_slices, multiple)
        assert len(lengths) == num_slices and sum(lengths) == num_elems, case
        assert lengths == sorted(lengths, reverse=True), case
        assert sum(length % multiple != 0 for length in lengths) <= 1, case
        assert lengths[0] < -(-num_elems // num_slices) + multiple, case


def test_no_slice_is_longer_than_needed() -> None:
    assert slice_lengths(10, 4) == [3, 3, 3, 1]
    assert slice_lengths(300, 3, 128) == [128, 128, 44]
    assert slice_lengths(130, 3, 128) == [128, 2, 0]
