"""Codes, scales and minima of packed blocks, read bit by bit: the meaning of the bytes of ``gguf_blocks``."""

from collections.abc import Callable

import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import PackedFormat

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Codes (..., numbers), integers of each scale (..., scales) and of each minimum, of blocks (..., bytes).
_Parts = tuple[Tensor, Tensor | None, Tensor | None]


def parts_of(blocks: Tensor, packed: PackedFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (..., scales, ``scale_elems``) without bias, scales (..., scales, 1) and minima alike, all float32."""
    codes, scale_integers, minimum_integers = _READERS[packed.name](blocks.int())
    if packed.name == "MXFP4":
        exponents = blocks[..., :1].int()
        scales = torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    else:
        scales = _float16(blocks, packed.floats_at)
    minima = _float16(blocks, packed.floats_at + 2) if packed.has_minimum else None
    if scale_integers is not None:
        scales = scales * scale_integers.float()
    if minima is not None and minimum_integers is not None:
        minima = -(minima * minimum_integers.float())
    codes = codes.float().unflatten(-1, (-1, packed.scale_elems))
    return codes, scales[..., None], None if minima is None else minima[..., None]


def _float16(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fields(plane: Tensor, bits: int, run: int) -> Tensor:
    """Codes of ``bits`` of a plane: the lowest bits of ``run`` bytes, then their next bits, ..., then the next bytes."""
    shifts = torch.arange(0, 8, bits, dtype=plane.dtype, device=plane.device)[:, None]
    return (plane.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def _five_bits(block: Tensor) -> Tensor:
    """Of four bytes of fifth bits in order, then sixteen of low bits."""
    fifth = block[..., :4, None] >> torch.arange(8, dtype=block.dtype, device=block.device) & 1
    return _fields(block[..., 4:], 4, 16) | fifth.flatten(-2) << 4


def _from_table(table: tuple[int, ...], plane: Tensor) -> Tensor:
    return torch.tensor(table, device=plane.device)[_fields(plane, 4, 16)]


def _q3_k(block: Tensor) -> _Parts:
    high = _fields(block[..., :32], 1, 32)
    scales = _fields(block[..., 96:104], 4, 8) | _fields(block[..., 104:108], 2, 4) << 4
    return (_fields(block[..., 32:96], 2, 32) | high << 2) - 4, scales - 32, None


def _twelve_bytes(block: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits: four whole ones of each, whose upper bits are those of the other four."""
    scales, minima, rest = block[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    return (
        torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], -1),
        torch.cat([minima & 63, rest >> 4 | minima >> 6 << 4], -1),
    )


def _q6_k(block: Tensor) -> _Parts:
    low, high = _fields(block[..., :128], 4, 64), _fields(block[..., 128:192], 2, 32)
    return (low | high << 4) - 32, block[..., 192:208].to(torch.int8), None


def _iq4_xs(block: Tensor) -> _Parts:
    low = _fields(block[..., 4:8], 4, 1)
    high = _fields(block[..., 2:4], 2, 1)
    return _from_table(IQ4_TABLE, block[..., 8:]), (low | high << 4) - 32, None


_READERS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": lambda block: (block[..., 2:].to(torch.int8), None, None),
    "Q4_0": lambda block: (_fields(block[..., 2:], 4, 16) - 8, None, None),
    "Q4_1": lambda block: (_fields(block[..., 4:], 4, 16), None, None),
    "Q5_0": lambda block: (_five_bits(block[..., 2:]) - 16, None, None),
    "Q5_1": lambda block: (_five_bits(block[..., 4:]), None, None),
    "IQ4_NL": lambda block: (_from_table(IQ4_TABLE, block[..., 2:]), None, None),
    "MXFP4": lambda block: (_from_table(MXFP4_TABLE, block[..., 1:]), None, None),
    "Q2_K": lambda block: (_fields(block[..., 16:80], 2, 32), block[..., :16] & 15, block[..., :16] >> 4),
    "Q3_K": _q3_k,
    "Q4_K": lambda block: (_fields(block[..., 16:], 4, 32), *_twelve_bytes(block)),
    "Q5_K": lambda block: (
        _fields(block[..., 48:], 4, 32) | _fields(block[..., 16:48], 1, 32) << 4,
        *_twelve_bytes(block),
    ),
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
