"""Paged causal attention on a GPU; ``kernels.attention`` documents the arguments.

Prefill rows and decode rows have separate kernels (``attention_prefill``, ``attention_decode``): tiles of queries fill
the matrix units for prefill, chunks of keys fill the device for decode. The two kernels differ in a row's last bits,
and the choice depends only on the kind of row, as in ``linear``.

A row's bits depend on its own sequence alone: key tiles begin at position 0, chunks at a tile and with a size that depend on
the row's keys, a row of a matrix product not on the tile's other rows, and a tile of masked keys changes nothing.
The one exception: an inf or NaN among the values of a prompt's later tokens reaches earlier rows of their tile.
"""

import torch
from torch import Tensor

from tightwire.kernels.cuda.attention_decode import attend_decode_rows
from tightwire.kernels.cuda.attention_prefill import attend_prefill_rows
from tightwire.kernels.spec.attention import AttentionForm, PackedSequences, check_attention

_MAX_HEAD_DIM = 256
_MAX_HEADS_PER_KV_HEAD = 128


def paged_attention(
    q_THE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, sequences: PackedSequences, form: AttentionForm
) -> Tensor:
    """Compute ``attention.paged_attention`` for CUDA tensors, without waiting for the device.

    Invalid lengths and blocks are not detected. A decode row with a context length of 0 is padding and becomes zeros.
    Raises ValueError if shapes, dtypes or strides do not match, or heads are too large for the kernels.
    """
    check_attention(q_THE, k_cache_NKPE, v_cache_NKPE, sequences, form)
    (num_tokens, _, head_dim), num_decode_rows = q_THE.shape, sequences.num_decode_rows
    per_kv_head = form.groups_of(q_THE, k_cache_NKPE).heads_per_kv_head
    if head_dim > _MAX_HEAD_DIM or per_kv_head > _MAX_HEADS_PER_KV_HEAD:
        most = f"{_MAX_HEAD_DIM} numbers and {_MAX_HEADS_PER_KV_HEAD} query heads per KV head"
        raise ValueError(f"attention on a GPU supports heads of at most {most}, got {head_dim} and {per_kv_head}")
    if not form.scale > 0 or not 0 <= num_decode_rows <= num_tokens:
        needs = f"attention on a GPU needs a scale above 0 and 0 to {num_tokens} decode rows"
        raise ValueError(f"{needs}; got {form.scale} and {num_decode_rows}")
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    arguments = q_THE, k_cache_NKPE, v_cache_NKPE, sequences, form, out_THE
    if num_decode_rows:
        attend_decode_rows(*arguments)
    if num_decode_rows < num_tokens:
        attend_prefill_rows(*arguments)
    return out_THE
