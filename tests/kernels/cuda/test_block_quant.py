"""The Triton kernels of block quantization, in Triton's interpreter: byte for byte the reference, for formats of all kinds."""

from collections.abc import Iterator

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.group import Group
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import PLANES, BlockFormat

pytestmark = needs_triton

OPTIONS = ("", "-sym", "-had", "-sym-had")


GROUPS = ("", "-g64", "-g32")


def _names(group: str) -> list[str]:
    """Formats with groups of this size: over the sizes each number of bits meets each option once, and each size with both."""
    turn = GROUPS.index(group)
    integers = [
        f"int{bits}{group}{option}"
        for at, bits in enumerate(PLANES)
        for place, option in enumerate(OPTIONS)
        if (turn + at + place) % 3 == 0
    ]
    return [*integers, f"fp8{group}"]


def _format(name: str) -> BlockFormat:
    fmt = parse_codec(name).format
    assert fmt is not None
    return fmt


def _numbers(num_elems: int, seed: int = 0) -> Tensor:
    """Magnitudes from 2^-8 to 2^8."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-8, 9, (num_elems,), generator=generator).float())
    return torch.randn(num_elems, generator=generator) * scales


def _hard_numbers() -> Tensor:
    """Groups of zeros of both signs, constants, denormals, inf, NaN, and numbers near the end of float32."""
    x_N = _numbers(4500)
    x_N[100:140], x_N[140:160] = 0.0, -0.0
    x_N[300:310], x_N[600], x_N[900:905], x_N[3300] = torch.inf, torch.nan, -torch.inf, -torch.nan
    x_N[1200:1600] = 3.0
    x_N[1700:1800], x_N[1800:1810] = 1e-40, -1e-42
    x_N[2000:2010], x_N[2015], x_N[2300:2310], x_N[2600] = 3.3e38, -3.3e38, 3.39e38, torch.finfo(torch.float32).max
    x_N[2900:2904] = torch.tensor([7e4, -7e4, 1e30, -1e-30])
    x_N[3000:3200] *= 1e-38
    return x_N


def _equal(a: Tensor, b: Tensor) -> bool:
    """The same bits, but for which NaN it is."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    same_bits = torch.equal(a.nan_to_num(1.0).view(torch.uint8), b.nan_to_num(1.0).view(torch.uint8))
    return same_bits and torch.equal(a.isnan(), b.isnan())


def _encode(x_N: Tensor, fmt: BlockFormat, carried_M: Tensor | None = None) -> Tensor:
    from tightwire.kernels.cuda import block_quant as block_quant_triton

    out = torch.empty(fmt.encoded_bytes(len(x_N)), dtype=torch.uint8)
    block_quant_triton.encode(x_N, fmt, out, carried_M)
    return out


def _decode_reduce_encode(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int, carried_M: Tensor | None = None
) -> Tensor:
    from tightwire.kernels.cuda import block_quant as block_quant_triton

    out = torch.empty(out_fmt.encoded_bytes(num_elems), dtype=torch.uint8)
    block_quant_triton.decode_reduce_encode(bufs, fmt, out_fmt, num_elems, out, carried_M)
    return out


def _differences(name: str, x_N: Tensor) -> Iterator[str]:
    from tightwire.kernels.cuda import block_quant as block_quant_triton

    fmt, num_elems = _format(name), x_N.numel()
    want = reference.encode_reference(x_N, fmt)
    if not torch.equal(_encode(x_N, fmt), want):
        yield f"{name} encode {num_elems} {x_N.dtype}"
    at_odd_address = torch.empty(want.numel() + 1, dtype=torch.uint8)[1:].copy_(want)
    decoded = torch.empty_like(x_N)
    block_quant_triton.decode(at_odd_address, fmt, decoded)
    if not _equal(decoded, reference.decode_reference(want, fmt, num_elems, x_N.dtype)):
        yield f"{name} decode {num_elems} {x_N.dtype}"


def _check_formats(group: Group, names: list[str]) -> list[str]:
    return [text for name in names for text in _differences(name, _numbers(3000).bfloat16())]


def _check_hard_numbers(group: Group) -> list[str]:
    names = ("int8", "int6-g32-sym", "int5-had", "int3-g64-sym", "fp8")
    return [
        text
        for name in names
        for dtype in (torch.float32, torch.bfloat16)
        for text in _differences(name, _hard_numbers().to(dtype))
    ]


def _check_sizes(group: Group) -> list[str]:
    """One number, a group and its neighbours, whole programs, and all types."""
    cases = [
        (1, torch.float16),
        (31, torch.float32),
        (129, torch.bfloat16),
        (8192, torch.float16),
        (8192, torch.bfloat16),
    ]
    return [
        text
        for name in ("int4", "int3-g32")
        for n, dtype in cases
        for text in _differences(name, _numbers(n).to(dtype))
    ]


def _check_decode_add(group: Group) -> None:
    from tightwire.kernels.cuda import block_quant as block_quant_triton

    for name in ("int8", "int5-g32-had"):
        fmt = _format(name)
        buf, want, got = (
            reference.encode_reference(_numbers(4500), fmt),
            _numbers(4500, seed=1),
            _numbers(4500, seed=1),
        )
        reference.decode_add_reference(buf, fmt, want)
        block_quant_triton.decode(buf, fmt, got, adds=True)
        assert torch.equal(got, want), name


def _check_decode_reduce_encode(group: Group, pairs: list[tuple[str, str]]) -> None:
    for name, out_name in pairs:
        fmt, out_fmt = _format(name), _format(out_name)
        bufs = [reference.encode_reference(_numbers(4513, seed), fmt) for seed in range(3)]
        want = reference.decode_reduce_encode_reference(bufs, fmt, out_fmt, 4513)
        got = _decode_reduce_encode(bufs, fmt, out_fmt, 4513)
        assert torch.equal(got, want), f"{name} to {out_name}"


def _check_carried(group: Group, names: list[str]) -> None:
    for name in names:
        fmt = _format(name)
        for num_elems in (1, 4513):
            carried_M = torch.zeros(fmt.carried_elems(num_elems), dtype=torch.bfloat16)
            want_M = carried_M.clone()
            bufs = []
            for seed, dtype in enumerate((torch.bfloat16, torch.float32)):
                x_N = _numbers(num_elems, seed).to(dtype)
                bufs.append(reference.encode_reference(x_N, fmt, want_M))
                assert torch.equal(_encode(x_N, fmt, carried_M), bufs[-1]), f"{name} {num_elems}"
                assert _equal(carried_M, want_M), f"{name} {num_elems}: carried"
            want = reference.decode_reduce_encode_reference(bufs, fmt, fmt, num_elems, want_M)
            got = _decode_reduce_encode(bufs, fmt, fmt, num_elems, carried_M)
            assert torch.equal(got, want) and _equal(carried_M, want_M), f"{name} {num_elems}: sums"
    fmt, x_N = _format("int4-g64-sym-had"), _hard_numbers()
    carried_M = torch.zeros(fmt.carried_elems(len(x_N)), dtype=torch.bfloat16)
    want_M = carried_M.clone()
    for _ in range(2):
        want = reference.encode_reference(x_N, fmt, want_M)
        assert torch.equal(_encode(x_N, fmt, carried_M), want) and _equal(carried_M, want_M)


@pytest.mark.parametrize("group", GROUPS)
def test_formats_give_the_references_bytes(group: str, interpreted: InterpretedRank) -> None:
    assert interpreted(_check_formats, _names(group)) == []


def test_hard_numbers(interpreted: InterpretedRank) -> None:
    assert interpreted(_check_hard_numbers) == []


def test_sizes_and_types(interpreted: InterpretedRank) -> None:
    assert interpreted(_check_sizes) == []


def test_decode_add(interpreted: InterpretedRank) -> None:
    interpreted(_check_decode_add)


def test_decode_reduce_encode_across_formats(interpreted: InterpretedRank) -> None:
    """Groups of unlike size, sums that stay rotated and that do not, a last group that is filled up."""
    pairs = [
        ("int8", "int8"),
        ("int4", "int8"),
        ("int8", "int4-g32"),
        ("int4-g32", "int5"),
        ("int4-had", "int4-had"),
        ("int4-g32-had", "int6-had"),
        ("int3-sym", "fp8"),
        ("int2-g64-sym", "int4-sym-had"),
    ]
    interpreted(_check_decode_reduce_encode, pairs)


def test_what_encoding_loses_is_carried(interpreted: InterpretedRank) -> None:
    interpreted(_check_carried, ["int8-had", "int5-g32", "fp8-g64", "int4-g64-sym-had"])
