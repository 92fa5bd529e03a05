"""Rotary position embedding, half-split layout: element i turns with element i + E/2, as Hugging Face stores Llama."""

import torch
from torch import Tensor


def apply_rope_reference(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` with cos and sin rounded to x's dtype first; every product rounds there too.

    Args:
        x_THE: (T, H, E) queries or keys; may be a view into a wider matrix.
        cos_TE, sin_TE: (T, E/2) float32, one angle per pair of elements.
    """
    cos_T1E = cos_TE.to(x_THE.dtype).unsqueeze(1)
    sin_T1E = sin_TE.to(x_THE.dtype).unsqueeze(1)
    first, second = x_THE.chunk(2, dim=-1)
    return torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), dim=-1)


def apply_rope(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    return apply_rope_reference(x_THE, cos_TE, sin_TE)
