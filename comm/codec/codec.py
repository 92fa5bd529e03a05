"""Codecs by name: encodings of a tensor for the wire, such as ``none``, ``int8`` or ``int4-g64-had``; slices of tensors.

``kernels.block_quant`` defines the bytes. A tensor has one slice for each rank. Sums of slices are float32 in rank order of
the (decoded) numbers, rounded once at the end; a rank's own slice is encoded too. So every rank that adds the same slices
gets the same bits, and an element's sum depends only on the ranks' numbers in its codec group (without a codec, on the
ranks' numbers for it). ``codec.error_bounds`` bounds the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

from tightwire.comm.codec.codec_names import has_feedback, parse_format
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_bound
from tightwire.kernels.spec.block_format import MAX_GROUP_ELEMS, BlockFormat


@dataclass(frozen=True, slots=True)
class Codec:
    """An encoding of numbers. Without a ``format`` it is ``none``: the numbers unchanged, in their own dtype."""

    name: str
    format: BlockFormat | None = None
    feedback: bool = False  # sums over ranks carry the rounding error of one message into the next (``Feedback``)

    @property
    def exact(self) -> bool:
        return self.format is None

    @property
    def label(self) -> str:
        """The algorithm's name in the ledger, for a collective with this codec."""
        return "direct" if self.exact else self.name

    @property
    def group_elems(self) -> int:
        """Elements that are encoded together; a message may be split at multiples of this."""
        return 1 if self.format is None else self.format.group_elems

    @property
    def rotated_elems(self) -> int:
        """Elements that are rotated together, 1 without rotation."""
        return self.format.group_elems if self.format is not None and self.format.hadamard else 1

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return num_elems * elem_bytes if self.format is None else self.format.encoded_bytes(num_elems)

    def encode(self, x_N: Tensor, out: Tensor | None = None, carried_M: Tensor | None = None) -> Tensor:
        """Encode (N,) contiguous to uint8 bytes, into ``out`` if given. With ``none`` and no ``out``, a view of ``x_N``.

        ``carried_M``, the error of the previous encoding (``Feedback``), is added before encoding, then overwritten with the
        new error.
        """
        if self.format is not None:
            return block_quant.encode(x_N, self.format, out, carried_M)
        bytes_of_x = x_N.view(torch.uint8)
        return bytes_of_x if out is None else out.copy_(bytes_of_x)

    def decode(self, buf: Tensor, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Decode ``num_elems`` numbers of ``dtype`` from ``buf``. With ``none`` and no ``out``, a view of ``buf``."""
        if self.format is not None:
            return block_quant.decode(buf, self.format, num_elems, dtype, out)
        return buf.view(dtype) if out is None else out.copy_(buf.view(dtype))

    def decode_add(self, buf: Tensor, sum_N: Tensor, dtype: torch.dtype) -> None:
        """Add the numbers of ``buf``, of ``dtype`` before encoding, to the float32 ``sum_N``."""
        if self.format is not None:
            block_quant.decode_add(buf, self.format, sum_N)
        else:
            sum_N.add_(buf.view(dtype))

    def max_error(self, x_N: Tensor) -> Tensor:
        """(N,) float64: bounds on |decode(encode(x)) - x| before rounding (``kernels.spec.block_bound``)."""
        if self.format is None:
            return torch.zeros(x_N.shape, dtype=torch.float64, device=x_N.device)
        return block_bound.max_error(x_N, self.format)


NONE = Codec("none")
Carried = tuple[Tensor | None, Tensor | None]  # errors of the reduce and the gather leg, with feedback


class Feedback:
    """The rounding errors of earlier sums of the same rows, which the next sums send along.

    A residual stream adds up all sums of a forward pass. With feedback, the error of that total is the error of its latest
    sum, not of all: error feedback (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847) over layers instead of
    training steps. Each rank keeps the errors of its own partial sums, and the owner of a slice those of the slice's sum,
    so a result still depends only on the ranks' numbers of its own group in this sum and in earlier ones.

    Errors are rotated as the codec's numbers are, so codecs of unlike rotation keep separate errors. They are bfloat16:
    ``elem_bytes`` for each number of a message and leg, kept until the pass ends.
    """

    elem_bytes = 2

    def __init__(self) -> None:
        self._carried: dict[tuple[str, int, int], Tensor] = {}

    def carried(self, name: str, codec: Codec, num_elems: int, device: torch.device) -> Tensor | None:
        """The errors of one leg, called ``name``, for ``codec`` to update; zero before its first sum.

        None for a codec without feedback. Numbers are where they are in the message, which is filled up to whole groups.
        """
        if codec.format is None or not codec.feedback:
            return None
        key = name, num_elems, codec.rotated_elems
        if key not in self._carried:
            filled = -(-num_elems // MAX_GROUP_ELEMS) * MAX_GROUP_ELEMS
            self._carried[key] = torch.zeros(filled, dtype=torch.bfloat16, device=device)
        return self._carried[key]


def parse_codec(name: str, feedback: bool = False) -> Codec:
    """Parse ``name``, which may end in ``-ef`` only with ``feedback``. Raises ValueError for other names."""
    if has_feedback(name) and not feedback:
        raise ValueError(f"codec {name!r}: only sums of flash have error feedback (-ef); leave -ef out")
    return Codec(name, parse_format(name), has_feedback(name))


SUMMABLE = (torch.float32, torch.bfloat16, torch.float16)
# Triton compiles separately for lengths of whole blocks, of whole groups, and others.
_PREPARED_LENGTHS = (1 << 16, 128, 17, 1)


def check_summable(x: Tensor) -> None:
    if x.dtype not in SUMMABLE:
        raise TypeError(f"numbers must be {', '.join(map(str, SUMMABLE))}, got {x.dtype}; convert them first")


def slice_lengths(num_elems: int, num_slices: int, multiple: int = 1) -> list[int]:
    """Lengths of slices of ceil(n / slices) elements, rounded up to a ``multiple``; the last may be short or empty."""
    length = -(-num_elems // num_slices)
    length = -(-length // multiple) * multiple
    return [max(0, min(length, num_elems - i * length)) for i in range(num_slices)]


def slices_for(num_elems: int, num_slices: int, *codecs: Codec) -> list[int]:
    """Elements of each slice, rounded up to whole groups of all ``codecs``, whose sizes are powers of two; the last may be short."""
    return slice_lengths(num_elems, num_slices, max(codec.group_elems for codec in codecs))


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ... in fp32, rounded once to the parts' dtype. Always a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    if len(parts) == 2:
        # torch adds 16-bit numbers in fp32 and rounds once: the same bits as below, in one pass.
        return torch.add(parts[0], parts[1])
    total = torch.add(parts[0].float(), parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def split_carried(carried_M: Tensor | None, lengths: Sequence[int], codec: Codec) -> list[Tensor | None]:
    """The errors of each slice, in whole groups; slices begin at multiples of a group."""
    if carried_M is None or codec.format is None:
        return [None] * len(lengths)
    starts = accumulate(lengths, initial=0)
    sizes = map(codec.format.carried_elems, lengths)
    return [carried_M[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def encode_slices(x_N: Tensor, lengths: Sequence[int], codec: Codec, carried_M: Tensor | None = None) -> list[Tensor]:
    """Encode slices of the contiguous ``x_N`` into consecutive memory; ``carried_M`` as in ``Codec.encode``."""
    elem_bytes = x_N.element_size()
    sizes = [codec.wire_bytes(length, elem_bytes) for length in lengths]
    if codec.exact:
        return list(codec.encode(x_N).split(sizes))
    slices = list(x_N.new_empty(sum(sizes), dtype=torch.uint8).split(sizes))
    errors = split_carried(carried_M, lengths, codec)
    for part, out, error in zip(x_N.split(list(lengths)), slices, errors, strict=True):
        if out.numel():
            codec.encode(part, out, error)
    return slices


def decode_slices(bufs: Sequence[Tensor], lengths: Sequence[int], codec: Codec, dtype: torch.dtype) -> Tensor:
    if codec.exact:
        return torch.cat(list(bufs)).view(dtype)
    x_N = bufs[0].new_empty(sum(lengths), dtype=dtype)
    for buf, part in zip(bufs, x_N.split(list(lengths)), strict=True):
        if part.numel():
            codec.decode(buf, part.numel(), dtype, part)
    return x_N


def sum_encoded(bufs: Sequence[Tensor], num_elems: int, codec: Codec, dtype: torch.dtype) -> Tensor:
    """The float32 sum of encoded slices of ``num_elems`` numbers each, of ``dtype`` before encoding."""
    sum_N = bufs[0].new_empty(num_elems, dtype=torch.float32)
    if num_elems == 0:
        return sum_N
    codec.decode(bufs[0], num_elems, dtype if codec.exact else torch.float32, sum_N)
    for buf in bufs[1:]:
        codec.decode_add(buf, sum_N, dtype)
    return sum_N


def sum_and_encode(
    bufs: Sequence[Tensor],
    num_elems: int,
    codec: Codec,
    out_codec: Codec,
    dtype: torch.dtype,
    carried_M: Tensor | None = None,
) -> Tensor:
    """Encode ``sum_encoded`` with ``out_codec`` (``none`` rounds it to ``dtype``), in one pass if both codecs quantize.

    ``carried_M`` as in ``Codec.encode``.
    """
    if num_elems == 0:
        return bufs[0].new_empty(0)
    if codec.exact and out_codec.exact:
        return sum_in_rank_order([buf.view(dtype) for buf in bufs]).view(torch.uint8)
    if codec.format is not None and out_codec.format is not None:
        return block_quant.decode_reduce_encode(
            list(bufs), codec.format, out_codec.format, num_elems, carried_M=carried_M
        )
    sum_N = sum_encoded(bufs, num_elems, codec, dtype)
    return out_codec.encode(sum_N.to(dtype) if out_codec.exact else sum_N, carried_M=carried_M)


def prepare_codecs(device: torch.device, *codecs: Codec) -> None:
    """Compile the GPU kernels of one codec or of a sum's two legs, so that no collective waits for the compiler."""
    if device.type == "cpu":
        return
    feedback = Feedback()
    for dtype, length in product(SUMMABLE, _PREPARED_LENGTHS):
        x_N = torch.zeros(length, dtype=dtype, device=device)
        for codec in codecs:
            encoded = codec.encode(x_N, carried_M=_own(feedback, codec, x_N))
            codec.decode(encoded, length, dtype)
            sum_encoded([encoded, encoded], length, codec, dtype)
        if len(codecs) == 2:
            encoded = codecs[0].encode(x_N)
            sum_and_encode([encoded], length, *codecs, dtype, _own(feedback, codecs[1], x_N))


def _own(feedback: Feedback, codec: Codec, x_N: Tensor) -> Tensor | None:
    return split_carried(feedback.carried("", codec, len(x_N), x_N.device), [len(x_N)], codec)[0]
