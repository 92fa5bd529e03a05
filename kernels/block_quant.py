"""Block quantization: a tensor to codes, scales and zeros in one run of bytes, and back. ``block_format`` is the layout.

The reference functions here are the specification, to the byte: every other implementation gives the same bytes from the
same numbers, on any device. That holds because each step is one IEEE operation in float32 whose result does not depend on
how it is carried out:

    rotate     Hadamard formats: log2(g) rounds of a + b, a - b, strides 1, 2, 4, ...; decoding does the same and divides
               by g, a power of two
    zero       the minimum, rounded DOWN to bfloat16
    scale      (maximum - zero) / max_code, rounded UP to bfloat16 and at least 2^-126, so that its inverse is finite
    code       (x - zero) * (1 / scale), clamped to 0 .. max_code, rounded to even
    decoded    code * scale + zero. The product of an 8-bit and a bfloat16 number is exact, fused or not

Rounding outwards means that nothing is clipped: a number comes back within half a scale of itself (``half_step_bound``).

Symmetric formats have scale = max|x| / max_level and no zero; float8 has scale = max|x| / 448 and the code e4m3(x / scale).
Formats with spikes take the range from the group's other numbers and write the two back when decoding.

A group with an inf or NaN in it, or a range beyond float32, decodes to NaN throughout: its scale (and spikes) are NaN and
its codes 0. So a broken sum shows, and large finite numbers (above float16's 65504, say) are ordinary numbers.
"""

import torch
from torch import Tensor

from tightwire.kernels.block_format import BlockFormat

MIN_SCALE = 2.0**-126  # float32's smallest normal number
FLOAT8_MAX = 448.0
_NAN_BF16 = 0x7FC0
_INF_BITS = 0x7F800000


def encode_reference(x_N: Tensor, fmt: BlockFormat) -> Tensor:
    """(N,) float32, bfloat16 or float16 to (fmt.encoded_bytes(N),) uint8."""
    return _encode_groups(_rotated(_to_groups(x_N, fmt), fmt), fmt)


def decode_reference(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype) -> Tensor:
    """The (num_elems,) numbers that ``buf`` stands for, rounded to ``dtype`` once."""
    groups_GE = _unrotated(_decode_groups(buf, fmt, num_elems), fmt)
    return groups_GE.view(-1)[:num_elems].to(dtype)


def decode_add_reference(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``sum_N`` (float32) += what ``buf`` stands for."""
    sum_N.add_(decode_reference(buf, fmt, sum_N.numel(), torch.float32))


def decode_reduce_encode_reference(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int
) -> Tensor:
    """Encode, as ``out_fmt``, the float32 sum of what ``bufs`` stand for, added in list order from the first.

    When both formats rotate groups of one size the sum is taken of the rotated numbers: rotating is linear.
    """
    stay_rotated = fmt.hadamard and out_fmt.hadamard and fmt.group_elems == out_fmt.group_elems
    total: Tensor | None = None
    for buf in bufs:
        groups_GE = _decode_groups(buf, fmt, num_elems)
        if not stay_rotated:
            groups_GE = _unrotated(groups_GE, fmt)
        total = groups_GE if total is None else total + groups_GE
    assert total is not None, "nothing to add"
    if stay_rotated:
        return _encode_groups(total, out_fmt)
    return encode_reference(total.view(-1)[:num_elems], out_fmt)


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None) -> Tensor:
    """``encode_reference``, into ``out`` when given."""
    return _into(out, encode_reference(x_N, fmt))


def decode(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``decode_reference``, into ``out`` when given."""
    return _into(out, decode_reference(buf, fmt, num_elems, dtype))


def decode_add(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``decode_add_reference``."""
    decode_add_reference(buf, fmt, sum_N)


def decode_reduce_encode(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int, out: Tensor | None = None
) -> Tensor:
    """``decode_reduce_encode_reference``, into ``out`` when given."""
    return _into(out, decode_reduce_encode_reference(bufs, fmt, out_fmt, num_elems))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _to_groups(x_N: Tensor, fmt: BlockFormat) -> Tensor:
    """(G, g) float32; the tail is filled with the last number, which widens no range."""
    x_N = x_N.float()
    missing = -x_N.numel() % fmt.group_elems
    if missing:
        x_N = torch.cat([x_N, x_N[-1:].expand(missing)])
    return x_N.view(-1, fmt.group_elems)


def _rotated(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    """Each group times the Hadamard matrix of its size: entries +1 and -1, not scaled."""
    if not fmt.hadamard:
        return groups_GE
    size, stride = fmt.group_elems, 1
    while stride < size:
        a, b = groups_GE.view(-1, size // (2 * stride), 2, stride).unbind(2)
        groups_GE = torch.stack([a + b, a - b], dim=2).view(-1, size)
        stride *= 2
    return groups_GE


def _unrotated(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    """The matrix is its own inverse but for the factor g."""
    return _rotated(groups_GE, fmt) * (1.0 / fmt.group_elems) if fmt.hadamard else groups_GE


def _encode_groups(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    finite_G1 = (groups_GE.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True) < _INF_BITS
    groups_GE = torch.where(finite_G1, groups_GE, 0.0)
    if not fmt.has_zeros:
        return _encode_symmetric(groups_GE, finite_G1, fmt)
    spikes: list[Tensor] = []
    ranged_GE = groups_GE
    if fmt.spikes:
        low_G1, high_G1 = _first(groups_GE, largest=False), _first(groups_GE, largest=True)
        # + 0.0 makes -0 of 0: implementations differ in which zero is the smaller one.
        values = [groups_GE.gather(1, place) + 0.0 for place in (low_G1, high_G1)]
        spikes = [torch.where(finite_G1, _bits_of_bf16(value), _NAN_BF16) for value in values]
        spikes += [torch.where(finite_G1, place, 0) for place in (low_G1, high_G1)]
        places_E = torch.arange(fmt.group_elems, device=groups_GE.device)
        ranged_GE = torch.where((places_E == low_G1) | (places_E == high_G1), torch.nan, groups_GE)
    minimum_G1 = ranged_GE.nan_to_num(torch.inf).amin(1, keepdim=True) + 0.0
    maximum_G1 = ranged_GE.nan_to_num(-torch.inf).amax(1, keepdim=True)
    zero_G1 = _from_bf16(_bf16_below(minimum_G1))
    range_G1 = maximum_G1 - zero_G1
    finite_G1 = finite_G1 & (range_G1 < torch.inf)
    scale_bits_G1 = _scale_bits(range_G1 / fmt.max_code)
    inverse_G1 = 1.0 / _from_bf16(scale_bits_G1)
    codes_GE = ((groups_GE - zero_G1) * inverse_G1).clamp(0, fmt.max_code).round().to(torch.uint8)
    if fmt.spikes:
        spikes[0], spikes[1] = (torch.where(finite_G1, bits, _NAN_BF16) for bits in spikes[:2])
        spikes[2], spikes[3] = (torch.where(finite_G1, place, 0) for place in spikes[2:])
    sections = [
        *_planes(torch.where(finite_G1, codes_GE, 0), fmt),
        _as_bytes(torch.where(finite_G1, scale_bits_G1, _NAN_BF16)),
        _as_bytes(torch.where(finite_G1, _bf16_below(minimum_G1), 0)),
        *[_as_bytes(bits) for bits in spikes[:2]],
        *[place.to(torch.uint8).view(-1) for place in spikes[2:]],
    ]
    return torch.cat(sections)


def _encode_symmetric(groups_GE: Tensor, finite_G1: Tensor, fmt: BlockFormat) -> Tensor:
    magnitude_G1 = groups_GE.abs().amax(1, keepdim=True)
    scale_bits_G1 = _scale_bits(magnitude_G1 / (FLOAT8_MAX if fmt.float8 else fmt.max_level))
    finite_G1 = finite_G1 & (_from_bf16(scale_bits_G1) < torch.inf)
    scaled_GE = groups_GE * (1.0 / _from_bf16(scale_bits_G1))
    if fmt.float8:
        codes_GE = scaled_GE.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        level = fmt.max_level
        codes_GE = (scaled_GE.clamp(-level, level).round() + level).to(torch.uint8)
    scale_bits_G1 = torch.where(finite_G1, scale_bits_G1, _NAN_BF16)
    return torch.cat([*_planes(torch.where(finite_G1, codes_GE, 0), fmt), _as_bytes(scale_bits_G1)])


def _decode_groups(buf: Tensor, fmt: BlockFormat, num_elems: int) -> Tensor:
    """(G, g) float32, still rotated where the format rotates."""
    num_groups = fmt.num_groups(num_elems)
    starts = fmt.section_starts(num_elems)
    num_planes = len(fmt.plane_bits)
    codes_GE = torch.zeros(num_groups, fmt.group_elems, dtype=torch.uint8, device=buf.device)
    for start, bits, shift, size in zip(starts, fmt.plane_bits, fmt.plane_shifts, fmt.plane_bytes, strict=False):
        plane_GS = buf[start : start + num_groups * size].view(num_groups, size)
        parts = [(plane_GS >> at) & (2**bits - 1) for at in range(0, 8, bits)] if bits < 8 else [plane_GS]
        codes_GE |= torch.cat(parts, 1) << shift

    def numbers_G1(section: int) -> Tensor:
        start = starts[num_planes + section]
        # Cloned because a message may lie at an odd address, which a 16-bit view would refuse.
        return buf[start : start + 2 * num_groups].clone().view(torch.bfloat16).float().view(-1, 1)

    if fmt.float8:
        return codes_GE.view(torch.float8_e4m3fn).float() * numbers_G1(0)
    if fmt.symmetric:
        return (codes_GE.float() - fmt.max_level) * numbers_G1(0)
    groups_GE = codes_GE.float() * numbers_G1(0) + numbers_G1(1)
    if fmt.spikes:
        for section, values_G1 in ((-2, numbers_G1(2)), (-1, numbers_G1(3))):
            places_G = buf[starts[section] : starts[section] + num_groups]
            groups_GE.scatter_(1, places_G.long().view(-1, 1), values_G1)
    return groups_GE


def _planes(codes_GE: Tensor, fmt: BlockFormat) -> list[Tensor]:
    planes = []
    for bits, shift, size in zip(fmt.plane_bits, fmt.plane_shifts, fmt.plane_bytes, strict=True):
        fields_GSs = ((codes_GE >> shift) & (2**bits - 1)).view(-1, 8 // bits, size)
        plane_GS = fields_GSs[:, 0].clone()
        for index in range(1, 8 // bits):
            plane_GS |= fields_GSs[:, index] << (bits * index)
        planes.append(plane_GS.reshape(-1))
    return planes


def _first(groups_GE: Tensor, *, largest: bool) -> Tensor:
    """(G, 1) the first place of each group's largest (smallest) number."""
    extreme_G1 = groups_GE.amax(1, keepdim=True) if largest else groups_GE.amin(1, keepdim=True)
    size = groups_GE.shape[1]
    places_E = torch.arange(size, device=groups_GE.device)
    return torch.where(groups_GE == extreme_G1, places_E, size).amin(1, keepdim=True)


# --- bfloat16 as the upper half of float32's bits, in int32 -------------------------------------------------------------


def _scale_bits(quotient: Tensor) -> Tensor:
    return _bf16_above(quotient.clamp(min=MIN_SCALE))


def _bf16_above(value: Tensor) -> Tensor:
    """The smallest bfloat16 not below a number >= 0."""
    return (value.view(torch.int32) + 0xFFFF) >> 16


def _bf16_below(value: Tensor) -> Tensor:
    """The largest bfloat16 not above: towards zero for positive numbers, away from it for negative ones."""
    bits = value.view(torch.int32)
    return ((torch.where(bits < 0, bits + 0xFFFF, bits)) >> 16) & 0xFFFF


def _bits_of_bf16(value: Tensor) -> Tensor:
    """Rounded to nearest even."""
    return value.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF


def _from_bf16(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)


def _as_bytes(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
