"""Block quantization: a tensor to codes, scales and zeros in one run of bytes, and back. ``block_format`` is the layout.

These reference functions are the specification, to the byte: every other implementation gives the same bytes for the same
numbers, on any device. That is possible because each step is one IEEE operation in float32 with a unique result:

    rotate     Hadamard formats: log2(g) rounds of a + b, a - b, strides 1, 2, 4, ...; decoding does the same and divides
               by g, a power of two
    zero       the minimum, rounded DOWN to bfloat16
    scale      (maximum - zero) / max_code, rounded UP to bfloat16 and at least 2^-126, so that its inverse is finite
    code       (x - zero) * (1 / scale), clamped to 0 .. max_code, rounded to even
    decoded    code * scale + zero. The product of an 8-bit and a bfloat16 number is exact, fused or not
    sum        of messages, to be encoded again: the sum of their zero - c * scale, then in list order plus each
               (level + c) * scale, exact as well. c is ``sum_offset``: a code plus 128 is made a float by setting bits

Rounding outwards means that nothing is clipped: a number comes back within half a scale of itself (``block_bound`` has the exact bound).

Symmetric formats have no zero, levels from -L to L - 1, and scale = max|x| / L, negative where the largest size belongs to
a positive number: that number has level -L, and one of the same size and the other sign loses up to a whole scale. Float8
has scale = max|x| / 448 and the code e4m3(x / scale). Divisors are tensors: on a GPU torch multiplies by a number's inverse.

What encoding loses may be carried into the next sum: bfloat16 numbers, one for each of the groups' numbers as they are
encoded, so rotated if the format rotates. They are added before rounding, and become the difference from the decoded numbers,
rounded to nearest even; sizes below 2^-126 become 0 with their sign.

A group with an inf or NaN in it decodes to NaN throughout, and so does one whose numbers come so close to the end of
float32 that its highest code would decode to infinity: the scale is NaN, zero and codes 0. Rotated groups come so close from
about 2^125 / g on, and may then come back infinite as well; sums from about 2^118 on may be infinite or NaN.
"""

import torch
from torch import Tensor

from tightwire.kernels.spec.block_format import FLOAT8_MAX, MIN_SCALE, BlockFormat

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_NAN_BF16, _SIGN_BF16 = 0x7FC0, 0x8000
_INF_BITS = 0x7F800000


def encode_reference(x_N: Tensor, fmt: BlockFormat, carried_M: Tensor | None = None) -> Tensor:
    """(N,) float32, bfloat16 or float16 to (fmt.encoded_bytes(N),) uint8.

    ``carried_M``, (fmt.carried_elems(N),) bfloat16: the error of the previous encoding, which is added before encoding, then
    overwritten with the new error.
    """
    return _encode_carrying(rotated(to_groups(x_N, fmt), fmt), fmt, carried_M)


def _encode_carrying(groups_GE: Tensor, fmt: BlockFormat, carried_M: Tensor | None) -> Tensor:
    if carried_M is None:
        return _encode_groups(groups_GE, fmt)
    carried_M = carried_M[: groups_GE.numel()]
    groups_GE = groups_GE + carried_M.view_as(groups_GE).float()
    encoded = _encode_groups(groups_GE, fmt)
    lost_GE = groups_GE - _decode_groups(encoded, fmt, groups_GE.numel())
    carried_M.copy_(torch.where(lost_GE.abs() < MIN_SCALE, lost_GE * 0.0, lost_GE).view(-1))
    return encoded


def decode_reference(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype) -> Tensor:
    """The (num_elems,) numbers of ``buf``, rounded to ``dtype`` once."""
    return _turned_back(_decode_groups(buf, fmt, num_elems), fmt).view(-1)[:num_elems].to(dtype)


def decode_add_reference(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    """``sum_N`` (float32) += the numbers of ``buf``."""
    sum_N.add_(decode_reference(buf, fmt, sum_N.numel(), torch.float32))


def decode_reduce_encode_reference(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int, carried_M: Tensor | None = None
) -> Tensor:
    """Encode the float32 sum of ``bufs``, rotated if both formats rotate equal groups. ``carried_M`` as in ``encode_reference``."""
    assert bufs, "nothing to add"
    offset, parts = fmt.sum_offset, [_read_groups(buf, fmt, num_elems) for buf in bufs]
    starts = [(0.0 if zero_G1 is None else zero_G1) - offset * scale_G1 for _, scale_G1, zero_G1 in parts]
    total = sum(starts, torch.zeros_like(starts[0]))
    for levels_GE, scale_G1, _ in parts:
        total = total + (levels_GE + offset) * scale_G1
    if fmt.hadamard and out_fmt.hadamard and fmt.group_elems == out_fmt.group_elems:
        return _encode_carrying(total, out_fmt, carried_M)
    return encode_reference(_turned_back(total, fmt).view(-1)[:num_elems], out_fmt, carried_M)


def to_groups(x_N: Tensor, fmt: BlockFormat) -> Tensor:
    """(G, g) float32; the tail is filled with the last number, which widens no range."""
    x_N = x_N.float()
    if missing := -x_N.numel() % fmt.group_elems:
        x_N = torch.cat([x_N, x_N[-1:].expand(missing)])
    return x_N.view(x_N.numel() // fmt.group_elems, fmt.group_elems)


def rotated(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    """Each group times the Hadamard matrix of its size: entries +1 and -1, not scaled."""
    if not fmt.hadamard:
        return groups_GE
    num_groups, size = groups_GE.shape
    stride = 1
    while stride < size:
        a, b = groups_GE.view(num_groups, size // (2 * stride), 2, stride).unbind(2)
        groups_GE = torch.stack([a + b, a - b], dim=2).view(num_groups, size)
        stride *= 2
    return groups_GE


def _encode_groups(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    finite_G1 = _bits_of(groups_GE.abs()).amax(1, keepdim=True) < _INF_BITS
    groups_GE = groups_GE.where(finite_G1, 0.0)
    low_G1, high_G1 = groups_GE.amin(1, keepdim=True), groups_GE.amax(1, keepdim=True)
    if fmt.has_zeros:
        # + 0.0 turns -0 into 0: implementations differ in which zero is the smaller one.
        zero_bits_G1 = _bf16_below(low_G1 + 0.0)
        zero_G1 = _from_bf16(zero_bits_G1)
        span_G1, top = high_G1 - zero_G1, fmt.max_code
    else:
        zero_bits_G1, zero_G1 = None, 0.0
        span_G1, top = torch.maximum(high_G1, -low_G1), FLOAT8_MAX if fmt.float8 else fmt.num_levels
    scale_bits_G1 = _bf16_above((span_G1 / torch.full_like(span_G1, top)).clamp(min=MIN_SCALE))
    scale_G1 = _from_bf16(scale_bits_G1)
    finite_G1 = finite_G1 & (top * scale_G1 + zero_G1 < torch.inf)
    if fmt.symmetric:
        scale_bits_G1 = scale_bits_G1 | (high_G1 > -low_G1).int() * _SIGN_BF16
        scale_G1 = _from_bf16(scale_bits_G1)

    codes_GE = _codes((groups_GE - zero_G1) * (1.0 / scale_G1), fmt)
    sections = _planes(codes_GE.where(finite_G1, 0), fmt)
    sections.append(_as_bytes(scale_bits_G1.where(finite_G1, _NAN_BF16)))
    if zero_bits_G1 is not None:
        sections.append(_as_bytes(zero_bits_G1.where(finite_G1, 0)))
    return torch.cat(sections)


def _codes(scaled_GE: Tensor, fmt: BlockFormat) -> Tensor:
    """(G, g) uint8 from numbers in units of the scale, counted from the zero."""
    if fmt.float8:
        return scaled_GE.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if fmt.symmetric:
        return (scaled_GE.clamp(-fmt.num_levels, fmt.num_levels - 1).round() + fmt.num_levels).to(torch.uint8)
    return scaled_GE.clamp(0, fmt.max_code).round().to(torch.uint8)


def _turned_back(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    """Rotated groups as numbers: the Hadamard matrix is its own inverse but for the factor g, a power of two."""
    return rotated(groups_GE, fmt) * (1.0 / fmt.group_elems) if fmt.hadamard else groups_GE


def _decode_groups(buf: Tensor, fmt: BlockFormat, num_elems: int) -> Tensor:
    """(G, g) float32, still rotated where the format rotates."""
    levels_GE, scale_G1, zero_G1 = _read_groups(buf, fmt, num_elems)
    return levels_GE * scale_G1 if zero_G1 is None else levels_GE * scale_G1 + zero_G1


def _read_groups(buf: Tensor, fmt: BlockFormat, num_elems: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Levels (G, g), scales and zeros (G, 1), all float32; zeros only of formats that have them."""
    num_groups = fmt.num_groups(num_elems)
    starts = [offset * num_groups for offset in fmt.section_offsets]
    num_planes = len(fmt.plane_bits)
    codes_GE = torch.zeros(num_groups, fmt.group_elems, dtype=torch.uint8, device=buf.device)
    for start, bits, shift, size in zip(starts, fmt.plane_bits, fmt.plane_shifts, fmt.plane_bytes, strict=False):
        plane_GS = buf[start : start + num_groups * size].view(num_groups, size)
        parts = [(plane_GS >> at) & (2**bits - 1) for at in range(0, 8, bits)]
        codes_GE |= torch.cat(parts, 1) << shift

    def numbers_G1(section: int) -> Tensor:
        start = starts[num_planes + section]
        # Cloned because a message may have an odd address, and a 16-bit view needs an even one.
        return buf[start : start + 2 * num_groups].clone().view(torch.bfloat16).float().view(num_groups, 1)

    if fmt.float8:
        return codes_GE.view(torch.float8_e4m3fn).float(), numbers_G1(0), None
    if fmt.symmetric:
        return codes_GE.float() - fmt.num_levels, numbers_G1(0), None
    return codes_GE.float(), numbers_G1(0), numbers_G1(1)


def _planes(codes_GE: Tensor, fmt: BlockFormat) -> list[Tensor]:
    planes = []
    for bits, shift, size in zip(fmt.plane_bits, fmt.plane_shifts, fmt.plane_bytes, strict=True):
        fields_GSs = ((codes_GE >> shift) & (2**bits - 1)).view(len(codes_GE), 8 // bits, size)
        plane_GS = fields_GSs[:, 0].clone()
        for index in range(1, 8 // bits):
            plane_GS |= fields_GSs[:, index] << (bits * index)
        planes.append(plane_GS.reshape(-1))
    return planes


# --- bfloat16 as the upper half of float32's bits, in int32 -------------------------------------------------------------


def _bf16_above(value: Tensor) -> Tensor:
    """The smallest bfloat16 not below a number >= 0."""
    return (_bits_of(value) + 0xFFFF) >> 16


def _bf16_below(value: Tensor) -> Tensor:
    """The largest bfloat16 not above: towards zero for positive numbers, away from it for negative ones."""
    bits = _bits_of(value)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) >> 16) & 0xFFFF


def _bits_of(value: Tensor) -> Tensor:
    return value.view(torch.int32)


def _from_bf16(bits: Tensor) -> Tensor:
    return (bits << 16).view(torch.float32)


def _as_bytes(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(-1).view(torch.uint8)


# --- kernels check nothing: raise ValueError unless they can take a tensor -----------------------------------------------


def check_numbers(x_N: Tensor, name: str, device: torch.device) -> None:
    if x_N.dtype not in _NUMBERS or x_N.dim() != 1 or not x_N.is_contiguous() or x_N.device != device:
        needs = f"{name} must be one-dimensional and contiguous, of {', '.join(map(str, _NUMBERS))}, on {device}"
        raise ValueError(f"{needs}; got {tuple(x_N.shape)} {x_N.dtype} with strides {x_N.stride()} on {x_N.device}")


def check_message(buf: Tensor, fmt: BlockFormat, num_elems: int, device: torch.device) -> None:
    size = fmt.encoded_bytes(num_elems)
    if buf.dtype != torch.uint8 or buf.shape != (size,) or not buf.is_contiguous() or buf.device != device:
        needs = f"{num_elems} numbers in {fmt} are ({size},) torch.uint8, contiguous, on {device}"
        raise ValueError(f"{needs}; got {tuple(buf.shape)} {buf.dtype} with strides {buf.stride()} on {buf.device}")


def bytes_for(num_elems: int, fmt: BlockFormat, out: Tensor | None, device: torch.device) -> Tensor:
    """Return ``out``, or a new tensor for a message of these numbers."""
    if out is None:
        return torch.empty(fmt.encoded_bytes(num_elems), dtype=torch.uint8, device=device)
    check_message(out, fmt, num_elems, device)
    return out


def check_carried(carried_M: Tensor | None, fmt: BlockFormat, num_elems: int, device: torch.device) -> None:
    """Raise ValueError if ``carried_M`` does not hold what encoding ``num_elems`` numbers loses."""
    if carried_M is None:
        return
    check_numbers(carried_M, "carried_M", device)
    least = fmt.carried_elems(num_elems)
    if carried_M.dtype != torch.bfloat16 or len(carried_M) < least:
        raise ValueError(f"carried_M must be {least} bfloat16 or more, got {len(carried_M)} of {carried_M.dtype}")
