"""Codes, scales and minima of packed blocks, read bit by bit: the meaning of the bytes of ``gguf_blocks``."""

from collections.abc import Callable

import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import PackedFormat


def parts_of(blocks: Tensor, packed: PackedFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (..., scales, ``scale_elems``) without bias, scales (..., scales, 1) and minima alike, all float32."""
    block = blocks.int()
    scale_integers, minimum_integers = _INTEGERS.get(packed.name, lambda block: (None, None))(block)
    if packed.name == "MXFP4":
        exponents = block[..., :1]
        scales = torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    else:
        scales = _float16(blocks, packed.floats_at)
    minima = _float16(blocks, packed.floats_at + 2) if packed.has_minimum else None
    if scale_integers is not None:
        scales = scales * scale_integers.float()
    if minima is not None and minimum_integers is not None:
        minima = -(minima * minimum_integers.float())
    codes = _codes(block, packed).float().unflatten(-1, (-1, packed.scale_elems))
    return codes, scales[..., None], None if minima is None else minima[..., None]


def _codes(block: Tensor, packed: PackedFormat) -> Tensor:
    own, elems = packed.codes, packed.block_elems
    codes = _fields(block[..., own.at : own.at + elems * own.bits // 8], own.bits, own.run)
    if own.high_bits:
        high = block[..., own.high_at : own.high_at + elems * own.high_bits // 8]
        codes |= _fields(high, own.high_bits, own.high_run) << own.bits
    if own.fifths_at:
        fifths = block[..., own.fifths_at : own.fifths_at + 4, None]
        codes |= (fifths >> torch.arange(8, dtype=block.dtype, device=block.device) & 1).flatten(-2) << 4
    if own.table:
        return torch.tensor(own.table, device=block.device)[codes]
    return codes.to(torch.int8) if own.bits == 8 else codes - own.offset


def _float16(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fields(plane: Tensor, bits: int, run: int) -> Tensor:
    """Codes of ``bits`` of a plane (``gguf_blocks.Codes``)."""
    shifts = torch.arange(0, 8, bits, dtype=plane.dtype, device=plane.device)[:, None]
    return (plane.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def _twelve_bytes(block: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of six bits: four whole ones of each, whose upper bits are those of the other four."""
    scales, minima, rest = block[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    return (
        torch.cat([scales & 63, rest & 15 | scales >> 6 << 4], -1),
        torch.cat([minima & 63, rest >> 4 | minima >> 6 << 4], -1),
    )


# The integers of each scale (..., scales) and of each minimum, of blocks (..., bytes).
_INTEGERS: dict[str, Callable[[Tensor], tuple[Tensor | None, Tensor | None]]] = {
    "Q2_K": lambda block: (block[..., :16] & 15, block[..., :16] >> 4),
    "Q3_K": lambda block: ((_fields(block[..., 96:104], 4, 8) | _fields(block[..., 104:108], 2, 4) << 4) - 32, None),
    "Q4_K": _twelve_bytes,
    "Q5_K": _twelve_bytes,
    "Q6_K": lambda block: (block[..., 192:208].to(torch.int8), None),
    "IQ4_XS": lambda block: ((_fields(block[..., 4:8], 4, 1) | _fields(block[..., 2:4], 2, 1) << 4) - 32, None),
}
