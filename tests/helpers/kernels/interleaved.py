"""The layout of interleaved rows (native/linear/interleaved.h) in torch."""

import torch

from tightwire.kernels.spec.gguf_blocks import INTERLEAVED_ROWS
from tightwire.kernels.spec.packed import PackedMatrix

# Bytes before the words of four bytes; of the other formats 2.
_HEAD_BYTES = {"MXFP4": 1, **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K", "IQ4_XS"), 4)}
_HEAD_BYTES |= dict.fromkeys(("Q2_K", "Q3_K", "Q6_K"), 0)


def interleave_reference(weight: PackedMatrix) -> PackedMatrix:
    """A copy with each full 16 rows as one tile a block, in which pieces of the rows' blocks are side by side.

    Pieces are words of four bytes, but for the floats and other bytes before and behind them, which are pieces of two or one.
    The 32 fifth bits of a Q5_0 or Q5_1 block become bit i // 4 of byte i % 4. Other rows stay.
    """
    packed, blocks, head_bytes = weight.format, weight.blocks_OB, _HEAD_BYTES.get(weight.format.name, 2)
    whole = len(blocks) // INTERLEAVED_ROWS * INTERLEAVED_ROWS
    # (panels, rows, blocks, bytes) to (panels, blocks, pieces, rows, piece bytes)
    blocks_PRGB = blocks[:whole].unflatten(1, (-1, packed.block_bytes)).unflatten(0, (-1, INTERLEAVED_ROWS))
    if packed.name in ("Q5_0", "Q5_1"):
        blocks_PRGB, at = blocks_PRGB.clone(), head_bytes
        bits = blocks_PRGB[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        spread = bits.flatten(-2).unflatten(-1, (8, 4)).mT << torch.arange(8, dtype=torch.uint8)
        blocks_PRGB[..., at : at + 4] = spread.sum(-1, dtype=torch.uint8)
    words_stop = packed.floats_at or packed.block_bytes
    head, words, tail = blocks_PRGB.tensor_split([head_bytes, words_stop], -1)
    parts = [
        part_PRGB.unflatten(-1, (-1, piece_bytes)).permute(0, 2, 3, 1, 4).flatten(2)
        for part_PRGB, piece_bytes in ((head, min(2, head_bytes)), (words, 4), (tail, 2))
        if part_PRGB.shape[-1]
    ]
    tiles = torch.cat(parts, -1).reshape(whole, blocks.shape[1])
    return PackedMatrix(torch.cat([tiles, blocks[whole:]]), packed, interleaved=True)
