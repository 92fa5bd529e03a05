"""The two legs of a quantized collective: exchange slices encoded (reduce-scatter), gather encoded sums (all-gather).

They add the time of encoding and decoding to the ledger; the caller records the collective itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.codec.slices import decode_slices, encode_slices
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.protocols import Transport


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
