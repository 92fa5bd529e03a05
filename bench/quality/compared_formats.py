"""Formats of other projects, in torch, to compare our codecs with: AMD's INT6 and INT4, and uniform quantization.

No server sends them. AMD's formats are those of QuickReduce in FlyDSL (ROCm/aiter, quick_allreduce_codec), to the byte. Here
the arithmetic is float32, and there float16, so that a number between two levels may get the other one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP_ELEMS = 16
_THREAD_ELEMS = 8  # consecutive numbers that one GPU thread packs into one word
_TILE_ELEMS = 2048  # numbers of 256 threads, whose sections follow each other
_EXPONENT_BIAS = 7
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-_EXPONENT_BIAS, 480.0
_INVERSE_OFFSET = 1e-7  # added before division, so that a group of zeros has an inverse


@dataclass(frozen=True, slots=True)
class AmdFormat:
    """Groups of 16 with signed scales of 8 bits. A tile of 2,048 numbers has these sections:

        low plane    bits 0-3 of the codes: one 32-bit word for 8 numbers, with numbers 0, 2, 4, 6 in its lower half
        high plane   bits 4-5, if ``bits`` is 6: one 16-bit word for 8 numbers in the same order
        scales       one byte a group

    A scale is the number s of the largest size in its group, as a float with 4 exponent and 3 mantissa bits: sizes are
    2^-7 to 480 without subnormal numbers, rounded to nearest, and larger ones saturate. With L = 2^(bits - 1), a number
    has level x / (-s / L), rounded to even and clamped to -L .. L - 1. A code is the level plus L.
    """

    bits: int = 6

    def __post_init__(self) -> None:
        if self.bits not in (4, 6):
            raise ValueError(f"bits must be 4 or 6, got {self.bits}")

    @property
    def num_levels(self) -> int:
        """L."""
        return 2 ** (self.bits - 1)

    @property
    def bits_per_number(self) -> float:
        """Scales included; without the padding of the last tile."""
        return self.bits + 8 / _GROUP_ELEMS

    def encoded_bytes(self, num_elems: int) -> int:
        """1,664 bytes for each tile begun with 6 bits, 1,152 with 4."""
        return -(-num_elems // _TILE_ELEMS) * int(_TILE_ELEMS * self.bits_per_number / 8)

    def encode(self, x_N: Tensor) -> Tensor:
        """(N,) finite numbers to (``encoded_bytes(N)``,) uint8; the last tile is filled with zeros."""
        missing = -x_N.numel() % _TILE_ELEMS
        groups_GE = torch.cat([x_N.float(), x_N.new_zeros(missing, dtype=torch.float32)]).view(-1, _GROUP_ELEMS)
        scales_G = _scale_codes(_extremum(groups_GE))
        step_G1 = _scales(scales_G).unsqueeze(1) * (-1.0 / self.num_levels)
        levels_GE = (groups_GE * (1.0 / (step_G1 + _INVERSE_OFFSET))).clamp(-self.num_levels, self.num_levels - 1)
        codes = (levels_GE.round() + self.num_levels).to(torch.uint8)
        # (tiles, threads, even or odd place, place): the order within a word
        codes_WHQ = codes.view(-1, _THREAD_ELEMS // 2, 2).transpose(1, 2)
        low_WHQ, num_tiles = codes_WHQ & 15, len(groups_GE) * _GROUP_ELEMS // _TILE_ELEMS
        sections = [low_WHQ[..., 0::2] | low_WHQ[..., 1::2] << 4]
        if self.bits == 6:
            high_WHQ = codes_WHQ >> 4
            sections.append(high_WHQ[..., 0] | high_WHQ[..., 1] << 2 | high_WHQ[..., 2] << 4 | high_WHQ[..., 3] << 6)
        return torch.cat([section.reshape(num_tiles, -1) for section in (*sections, scales_G)], 1).view(-1)

    def decode(self, buf: Tensor, num_elems: int) -> Tensor:
        """The (num_elems,) numbers of ``buf`` in float32: level times -s / L, exactly."""
        tiles = buf.view(-1, self.encoded_bytes(1))
        low_size, high_size = _TILE_ELEMS // 2, _TILE_ELEMS // 4 * (self.bits == 6)
        low_WHB = tiles[:, :low_size].reshape(-1, 2, 2)
        codes_WHQ = torch.stack([low_WHB & 15, low_WHB >> 4], 3).flatten(2)
        if high_size:
            high_WH1 = tiles[:, low_size : low_size + high_size].reshape(-1, 2, 1)
            codes_WHQ = codes_WHQ | (high_WH1 >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3) << 4
        levels_GE = codes_WHQ.transpose(1, 2).reshape(-1, _GROUP_ELEMS).float() - self.num_levels
        scales_G1 = _scales(tiles[:, low_size + high_size :].reshape(-1)).unsqueeze(1)
        return (levels_GE * (scales_G1 * (-1.0 / self.num_levels))).view(-1)[:num_elems]

    def max_error(self, x_N: Tensor) -> Tensor:
        """(N,) float64: bounds on |decode(encode(x)) - x| for finite numbers.

        With a the largest size of the group, the scale is at most s = max(17/16 a, 2^-6), because a size below 2^-7 keeps its
        mantissa, and at least t = min(15/16 a, 480). So x is off by s / 2L and 10^-7 |x| L / max(t, 2^-7) from the offset
        of the inverse, or, where levels end, by |x| - t (L - 1) / L. Float32 adds 8 roundings of |x|.
        """
        missing = -x_N.numel() % _GROUP_ELEMS
        groups_GE = torch.cat([x_N.double(), x_N.new_zeros(missing, dtype=torch.float64)]).view(-1, _GROUP_ELEMS)
        sizes_GE = groups_GE.abs()
        largest_G1 = sizes_GE.amax(1, keepdim=True)
        high_G1 = (largest_G1 * 17 / 16).clamp(2 * _LEAST_SCALE, _LARGEST_SCALE)
        low_G1 = (largest_G1 * 15 / 16).clamp(max=_LARGEST_SCALE)
        levels = self.num_levels
        rounded_GE = high_G1 / (2 * levels) + sizes_GE * levels * 1.001 * _INVERSE_OFFSET / low_G1.clamp(_LEAST_SCALE)
        clipped_GE = sizes_GE - low_G1 * (levels - 1) / levels
        bound_GE = torch.maximum(rounded_GE, clipped_GE) + 2.0**-21 * sizes_GE
        return bound_GE.where(largest_G1 > 0, 0.0).view(-1)[: x_N.numel()]


def _extremum(groups_GE: Tensor) -> Tensor:
    """(G,): the number of the largest size. Of equal sizes: the negative one of even or odd places, the odd place of both."""
    pairs_GQH = groups_GE.view(-1, _GROUP_ELEMS // 2, 2)
    high_GH, low_GH = pairs_GQH.amax(1), pairs_GQH.amin(1)
    even_G, odd_G = torch.where(high_GH.abs() > low_GH.abs(), high_GH, low_GH).unbind(1)
    return torch.where(even_G.abs() > odd_G.abs(), even_G, odd_G)


def _scale_codes(x_G: Tensor) -> Tensor:
    """(G,) uint8: sign, 4 bits of exponent, 3 of mantissa. 0 is zero; so a positive number of code 0 gets code 1."""
    # Half of the last place is added to the bits of float32; a carry increases the exponent.
    rounded_G = (x_G.abs().view(torch.int32) + (1 << 19)) >> 20
    codes_G = rounded_G - ((127 - _EXPONENT_BIAS) << 3)
    codes_G = torch.where(codes_G < 0, codes_G & 7, codes_G.clamp(max=127)) | (x_G < 0).int() << 7
    return torch.where(x_G == 0, 0, codes_G.where(codes_G != 0, 1)).to(torch.uint8)


def _scales(codes_G: Tensor) -> Tensor:
    bits_G = codes_G.int()
    sizes_G = (((bits_G & 127) + ((127 - _EXPONENT_BIAS) << 3)) << 20).view(torch.float32)
    return torch.where(bits_G >= 128, -sizes_G, sizes_G).where(bits_G != 0, 0.0)


def uniform(x_RE: Tensor, bits: int) -> Tensor:
    """The numbers of each row after uniform quantization, float32: levels -L to L with L = 2^(bits - 1) - 1.

    A row has one scale, max|x| / L, rounded up to bfloat16. So it takes ``bits`` a number and 16 a row.
    """
    x_RE, top = x_RE.float(), 2 ** (bits - 1) - 1
    scale_R1 = (x_RE.abs().amax(1, keepdim=True) / top).clamp(min=2.0**-126)
    scale_R1 = (((scale_R1.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
    return (x_RE / scale_R1).round().clamp(-top, top) * scale_R1
