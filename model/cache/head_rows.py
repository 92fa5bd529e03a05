"""Copies of the keys and values of some tokens: what a stage hands over to the ranks that decode with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]  # of one layer, (N, K, P, E) each


def take_rows(layers: Sequence[KeysAndValues], slots_T: Tensor) -> Tensor:
    """Return (L, 2, T, K, E): the keys and values in these slots, of all heads."""
    block_T, offset_T = _places(layers, slots_T)
    return torch.stack([torch.stack([each[block_T, :, offset_T] for each in layer]) for layer in layers])


def put_rows(layers: Sequence[KeysAndValues], slots_T: Tensor, rows_LCTKE: Tensor) -> None:
    """Write (L, 2, T, K, E), of the heads that ``layers`` have, to these slots."""
    block_T, offset_T = _places(layers, slots_T)
    for layer, rows_CTKE in zip(layers, rows_LCTKE, strict=True):
        for each, rows_TKE in zip(layer, rows_CTKE, strict=True):
            each[block_T, :, offset_T] = rows_TKE


def _places(layers: Sequence[KeysAndValues], slots_T: Tensor) -> tuple[Tensor, Tensor]:
    slots_T, block_size = slots_T.long(), layers[0][0].shape[2]
    return slots_T // block_size, slots_T % block_size
