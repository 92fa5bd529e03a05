"""The operations on integer lanes, each against torch, through small kernels compiled here."""

from typing import Any

import pytest
import torch

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector import simd_codes as codes
from tightwire.kernels.cpu.vector.jit import helper


@helper
def _spread(source: int, num_bytes: int, target: int) -> None:
    if num_bytes == 16:
        lanes = codes.load_16_bytes(source)
    elif num_bytes == 8:
        lanes = codes.load_8_bytes(source)
    else:
        lanes = codes.load_4_bytes(source)
    simd.store(target, codes.to_float(lanes))


@helper
def _join(source: int, num_bytes: int, target: int) -> None:
    """Lane i of ``source``'s bytes goes to bit i of its byte."""
    bits = codes.both(codes.load_16_bytes(source), codes.splat(1))
    if num_bytes == 16:
        codes.store_16_bytes(target, bits)
    elif num_bytes == 8:
        places = codes.shift_right(codes.lane_numbers(), codes.splat(3))
        codes.store_8_bytes(target, codes.shift_left(bits, places))
    else:
        places = codes.shift_right(codes.lane_numbers(), codes.splat(2))
        codes.store_4_bytes(target, codes.shift_left(bits, places))


@helper
def _round(source: int, offset: int, target: int) -> None:
    rounded = codes.sub(codes.round_to_integer(simd.load(source)), codes.splat(0x4B400000))
    simd.store(target, codes.to_float(codes.add(rounded, codes.mul(codes.splat(offset), codes.splat(3)))))


@helper
def _to_e4m3(source: int, target: int) -> None:
    codes.store_16_bytes(target, codes.to_e4m3(simd.load(source)))


@helper
def _from_e4m3(source: int, target: int) -> None:
    simd.store(target, codes.from_e4m3(codes.load_16_bytes(source)))


@helper
def _rotate(source: int, target: int) -> None:
    simd.store(target, codes.rotate(simd.load(source)))


@helper
def _least(source: int, wanted: float, target: int) -> int:
    """The minimum of the lanes and the one at ``target``, NaN aside; where ``wanted`` is first; 100 more with a NaN."""
    x = simd.load(source)
    least = codes.min_lanes(codes.minimum(x, simd.splat(simd.load_scalar(target))))
    simd.store_scalar(target, least)
    return codes.first_equal(x, wanted) + (100 if codes.any_nan(x) else 0)


@helper
def _scalars(source: int, target: int) -> None:
    codes.store_u16(target, codes.load_u16(source) + (1 << 16))
    codes.store_u8(target + 2, codes.load_u8(source + 2))
    simd.store_scalar(target + 4, codes.float_of(codes.bits_of(simd.load_scalar(source + 4)) ^ 1 << 31))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _address(x: torch.Tensor) -> int:
    return x.data_ptr()


@pytest.mark.parametrize("num_bytes", [16, 8, 4])
def test_bytes_go_to_lanes_and_back(num_bytes: int) -> None:
    source, out = torch.randint(0, 256, (16,), dtype=torch.uint8, generator=_seeded()), torch.empty(16)
    _spread(_address(source), num_bytes, _address(out))
    assert out.tolist() == source[:num_bytes].repeat(16 // num_bytes).tolist()
    packed = torch.full((18,), 99, dtype=torch.uint8)
    _join(_address(source), num_bytes, _address(packed) + 1)
    want = ((source & 1).view(-1, num_bytes) << torch.arange(16 // num_bytes, dtype=torch.uint8)[:, None]).sum(0)
    assert packed.tolist() == [99, *want.tolist(), *[99] * (17 - num_bytes)]


@pytest.mark.parametrize("offset", [0, -41, 70])
def test_rounding_is_to_even(offset: int) -> None:
    x, out = (
        torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 254.5, 0.49999997, -7.2, 3.7, 0, 1, -1, 100.5, 101.5, 1e6, -1e6]),
        torch.empty(16),
    )
    _round(_address(x), offset, _address(out))
    assert torch.equal(out, x.round() + 3 * offset)


def test_e4m3_as_torch_has_it() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    numbers = torch.empty(256)
    for at in range(0, 256, 16):
        _from_e4m3(_address(every) + at, _address(numbers) + 4 * at)
    want = every.view(torch.float8_e4m3fn).float()
    assert torch.equal(numbers.nan_to_num(), want.nan_to_num())
    assert torch.equal(numbers.isnan(), want.isnan())

    finite = want[want.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([finite, ties, ties.nextafter(torch.tensor(1e9)), ties.nextafter(torch.tensor(-1e9))])
    near = torch.cat(
        [near, -torch.zeros(1), torch.tensor([1e-42, -1e-30]), 20 * torch.randn(2000, generator=_seeded())]
    ).clamp(-448, 448)
    near = near[: len(near) // 16 * 16].contiguous()
    got = torch.empty(len(near), dtype=torch.uint8)
    for at in range(0, len(near), 16):
        _to_e4m3(_address(near) + 4 * at, _address(got) + at)
    assert torch.equal(got, near.to(torch.float8_e4m3fn).view(torch.uint8))


def test_rotation_is_a_hadamard_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x, out = torch.randint(-1000, 1000, (16,), generator=_seeded()).float(), torch.empty(16)
    _rotate(_address(x), _address(out))
    assert torch.equal(out, matrix @ x)


@pytest.mark.parametrize(
    ("changes", "before", "wanted", "want"),
    [
        ({}, 99.0, 7.0, (0.0, 7)),
        ({}, -5.0, 15.0, (-5.0, 15)),
        ({}, -5.0, 15.5, (-5.0, 16)),
        ({3: 12.0, 0: 12.0}, 50.0, 12.0, (1.0, 0)),
        ({0: float("nan")}, 50.0, 2.0, (1.0, 102)),
        ({5: -0.0, 0: 1.0}, 50.0, 0.0, (0.0, 5)),
    ],
)
def test_least_and_first(changes: dict[int, float], before: float, wanted: float, want: tuple[float, int]) -> None:
    x, least = torch.arange(16).float(), torch.tensor([before])
    for lane, value in changes.items():
        x[lane] = value
    place: Any = _least(_address(x), wanted, _address(least))
    assert (least.item(), place) == want


def test_scalars() -> None:
    source = torch.tensor([0xFE, 0xFF, 0x81, 0, 0, 0, 0x80, 0x3F], dtype=torch.uint8)
    target = torch.zeros(8, dtype=torch.uint8)
    _scalars(_address(source), _address(target))
    assert target.tolist() == [0xFE, 0xFF, 0x81, 0, 0, 0, 0x80, 0xBF]
