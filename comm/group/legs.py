"""The two legs of a quantized sum: exchange encoded slices, gather encoded sums. The caller records the collective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Carried, Codec, decode_slices, encode_slices, split_carried, sum_and_encode
from tightwire.comm.group.group import Group


def exchange_encoded(
    group: Group, x_N: Tensor, lengths: Sequence[int], codec: Codec, carried_M: Tensor | None = None
) -> list[Tensor]:
    """Encode each slice of ``x_N`` for its owner; return this rank's own slice as encoded by every rank."""
    with group.ledger.coding_if(not codec.exact):
        encoded = encode_slices(x_N, lengths, codec, carried_M)
    return group.transport.exchange(encoded)


def gather_decoded(group: Group, own: Tensor, lengths: Sequence[int], codec: Codec, dtype: torch.dtype) -> Tensor:
    """Share ``own``, this rank's encoded slice; return all decoded slices, concatenated: (sum(lengths),)."""
    received = group.transport.gather(own, [codec.wire_bytes(length, dtype.itemsize) for length in lengths])
    with group.ledger.coding_if(not codec.exact):
        return decode_slices(received, lengths, codec, dtype)


def sum_in_two_legs(
    group: Group,
    x_N: Tensor,
    lengths: Sequence[int],
    codecs: tuple[Codec, Codec],
    dtype: torch.dtype,
    carried: Carried = (None, None),
) -> Tensor:
    """The ranks' sum of ``x_N`` in ``dtype``: each rank adds the slice that ``lengths`` gives it.

    Each leg has its own one of ``codecs``, and of ``carried``, the errors that ``Codec.encode`` adds and overwrites.
    """
    reduce_codec, gather_codec = codecs
    received = exchange_encoded(group, x_N, lengths, reduce_codec, carried[0])
    own_carried = split_carried(carried[1], lengths, gather_codec)[group.rank]
    with group.ledger.coding_if(not (reduce_codec.exact and gather_codec.exact)):
        own = sum_and_encode(received, lengths[group.rank], reduce_codec, gather_codec, dtype, own_carried)
    return gather_decoded(group, own, lengths, gather_codec, dtype)


def two_leg_bytes(rank: int, lengths: Sequence[int], codecs: tuple[Codec, Codec], elem_bytes: int) -> int:
    """Bytes that ``rank`` sends in ``sum_in_two_legs``: the others' slices, then the sum of its own to each of them."""
    reduce_codec, gather_codec = codecs
    exchanged = sum(
        reduce_codec.wire_bytes(length, elem_bytes) for owner, length in enumerate(lengths) if owner != rank
    )
    return exchanged + (len(lengths) - 1) * gather_codec.wire_bytes(lengths[rank], elem_bytes)
