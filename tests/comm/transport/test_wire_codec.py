"""Lossless coding of bfloat16 messages: the bits come back, the bytes are the formula's, and what gains nothing is not coded."""

import pytest
import torch
from torch import Tensor

from tightwire.comm.transport import wire_codec
from tightwire.kernels.cpu.library import available

pytestmark = pytest.mark.skipif(not available(), reason="no compiled kernels")


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _numbers(kind: str, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    normal = torch.randn(num, generator=generator)
    return {
        "normal": lambda: normal.bfloat16(),
        "outliers": lambda: (normal * torch.where(torch.arange(num) % 50 == 0, 20.0, 1.0)).bfloat16(),
        "zeros": lambda: torch.where(torch.arange(num) % 3 == 0, 0.0, normal).bfloat16(),
        "special": lambda: torch.where(torch.arange(num) % 4096 == 5, float("nan"), normal).bfloat16(),
    }[kind]()


def _formula(x: Tensor) -> int:
    """89 bytes for each 64 numbers, and one for each exponent 7 or more below the largest of its 64."""
    whole = x[: len(x) // 64 * 64].view(torch.int16).int() >> 7 & 255
    groups = whole.view(-1, 64)
    escapes = int((groups.amax(1, keepdim=True) - groups >= 7).sum())
    return 89 * len(groups) + escapes + 2 * (len(x) % 64)


@pytest.mark.parametrize("num", [1 << 15, (1 << 15) + 33, 100_000])
@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "special"])
def test_the_bits_come_back_in_the_bytes_of_the_formula(kind: str, num: int) -> None:
    x = _numbers(kind, num)
    for offset in (0, 1):  # also at an odd address
        memory = torch.empty(2 * num + 1, dtype=torch.uint8)
        buf = memory[offset : offset + 2 * num]
        buf.copy_(_bytes(x))
        coded, out = wire_codec.encode(buf), torch.empty(2 * num, dtype=torch.uint8)
        if kind == "zeros":  # a third of the exponents is far away
            assert coded is None and _formula(x) > wire_codec._MOST_SHARE * x.nbytes
            continue
        assert coded is not None and coded.numel() == _formula(x)
        assert wire_codec.decode(coded, out) and torch.equal(out, _bytes(x))


@pytest.mark.parametrize("seed", range(20))
def test_any_bits_come_back(seed: int) -> None:
    """Whole groups, coded whether it pays or not."""
    generator = torch.Generator().manual_seed(seed)
    buf = torch.randint(0, 256, (128 * (1 + seed),), generator=generator, dtype=torch.uint8)
    coded, out = wire_codec._coded(buf), torch.empty_like(buf)
    assert coded.numel() == _formula(buf.view(torch.bfloat16))
    assert wire_codec.decode(coded, out) and torch.equal(out, buf)


def test_what_would_be_longer_is_not_coded() -> None:
    random = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8)
    assert wire_codec.encode(random) is None
    then_random = torch.cat([_bytes(_numbers("normal", 1 << 12)), random])  # the sample is of the first groups
    assert wire_codec.encode(then_random) is None


@pytest.mark.parametrize("change", ["shorter", "longer", "other codes", "nothing"])
@pytest.mark.parametrize("num_rest", [0, 33])
def test_a_damaged_message_is_found(change: str, num_rest: int) -> None:
    x = _bytes(_numbers("outliers", (1 << 15) + num_rest))
    coded = wire_codec.encode(x)
    assert coded is not None
    damaged = {
        "shorter": lambda: coded[:-1],
        "longer": lambda: torch.cat([coded, coded[:1]]),
        "other codes": lambda: torch.cat(
            [coded[: 1 << 15], ~coded[1 << 15 : (1 << 15) + 100], coded[(1 << 15) + 100 :]]
        ),
        "nothing": lambda: coded[:0],
    }[change]()
    assert not wire_codec.decode(damaged, torch.empty_like(x))
