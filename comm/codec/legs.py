"""The two legs of quantized collectives: sum one slice per rank (reduce-scatter) and share slices (all-gather).

Each leg quantizes a number at most once. These functions move and add; the callers (``all_reduce``, ``collectives``) record
the call in the ledger. Functions that move tell the ``ledger`` their coding time; the functions that only add
(``sum_encoded``, ``sum_and_encode``) are called inside ``with ledger.coding`` if they quantize.

Sums are float32 in rank order of the decoded numbers; a rank's own slice is encoded too. So every rank
that adds the same slices gets the same bits, and an element's sum depends only on the ranks' numbers in its codec group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.protocols import Transport
from tightwire.comm.sums import SUMMABLE, as_bytes, sum_in_rank_order
from tightwire.kernels import block_quant


def prepare(device: torch.device, codec: Codec, out_codec: Codec) -> None:
    """Compile the codecs' kernels now: in a first collective all other ranks would wait for this rank's compiler."""
    for dtype in SUMMABLE:
        encoded = codec.encode(torch.zeros(1, dtype=dtype, device=device))
        summed = sum_and_encode([encoded], 1, codec, out_codec, dtype)
        decode_slices([summed], [1], out_codec, dtype)


def exchange_encoded(
    transport: Transport, x_N: Tensor, lengths: Sequence[int], codec: Codec, ledger: Ledger
) -> list[Tensor]:
    """Encode each slice of ``x_N`` for its owner; return this rank's own slice as encoded by every rank."""
    if codec.exact:
        return transport.exchange(encode_slices(x_N, lengths, codec))
    with ledger.coding:
        encoded = encode_slices(x_N, lengths, codec)
    return transport.exchange(encoded)


def gather_decoded(
    transport: Transport, own: Tensor, lengths: Sequence[int], codec: Codec, dtype: torch.dtype, ledger: Ledger
) -> Tensor:
    """Share ``own``, this rank's encoded slice; return all decoded slices, concatenated: (sum(lengths),)."""
    received = transport.gather(own, [codec.wire_bytes(length, dtype.itemsize) for length in lengths])
    if codec.exact:
        return decode_slices(received, lengths, codec, dtype)
    with ledger.coding:
        return decode_slices(received, lengths, codec, dtype)


def encode_slices(x_N: Tensor, lengths: Sequence[int], codec: Codec) -> list[Tensor]:
    """Encode slices of the contiguous ``x_N`` into consecutive memory."""
    elem_bytes = x_N.element_size()
    sizes = [codec.wire_bytes(length, elem_bytes) for length in lengths]
    if codec.exact:
        return list(codec.encode(x_N).split(sizes))
    slices = list(x_N.new_empty(sum(sizes), dtype=torch.uint8).split(sizes))
    for part, out in zip(x_N.split(list(lengths)), slices, strict=True):
        if out.numel():
            codec.encode(part, out)
    return slices


def decode_slices(bufs: Sequence[Tensor], lengths: Sequence[int], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Decode ``bufs`` into one new tensor."""
    if codec.exact:
        return torch.cat(list(bufs)).view(dtype)
    x_N = bufs[0].new_empty(sum(lengths), dtype=dtype)
    for buf, part in zip(bufs, x_N.split(list(lengths)), strict=True):
        if part.numel():
            codec.decode(buf, part.numel(), dtype, part)
    return x_N


def sum_encoded(bufs: Sequence[Tensor], num_elems: int, codec: Codec, dtype: torch.dtype) -> Tensor:
    """The float32 sum of encoded slices of ``num_elems`` numbers each, of ``dtype`` before encoding."""
    if num_elems == 0:
        return bufs[0].new_empty(0, dtype=torch.float32)
    sum_N = bufs[0].new_empty(num_elems, dtype=torch.float32)
    if codec.exact:
        sum_N.copy_(bufs[0].view(dtype))
    else:
        codec.decode(bufs[0], num_elems, torch.float32, sum_N)
    for buf in bufs[1:]:
        codec.decode_add(buf, sum_N, dtype)
    return sum_N


def sum_and_encode(
    bufs: Sequence[Tensor], num_elems: int, codec: Codec, out_codec: Codec, dtype: torch.dtype
) -> Tensor:
    """``sum_encoded``, encoded with ``out_codec`` (``none``: rounded to ``dtype``), in one pass if both quantize."""
    if num_elems == 0:
        return bufs[0].new_empty(0)
    if codec.exact and out_codec.exact:
        return as_bytes(sum_in_rank_order([buf.view(dtype) for buf in bufs]))
    if codec.format is not None and out_codec.format is not None:
        return block_quant.decode_reduce_encode(list(bufs), codec.format, out_codec.format, num_elems)
    sum_N = sum_encoded(bufs, num_elems, codec, dtype)
    return out_codec.encode(sum_N.to(dtype) if out_codec.exact else sum_N)
