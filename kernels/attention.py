"""Causal attention over a paged KV cache; ``spec.attention`` has the reference and the layout of the cache."""

from torch import Tensor

from tightwire.kernels.cpu.attention import paged_attention_cpu
from tightwire.kernels.cpu.library import available
from tightwire.kernels.spec.attention import AttentionForm, PackedSequences, paged_attention_reference


def paged_attention(
    q_THE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, sequences: PackedSequences, form: AttentionForm
) -> Tensor:
    """Attend from this step's packed queries to each sequence's cached tokens, this step's included.

    A row's bits depend on its own sequence alone, and on a GPU on whether it is a decode row.

    Args:
        q_THE: (T, H, E); may be a view as long as E is contiguous. The result is contiguous.
    Raises:
        ValueError: shapes, dtypes or (on CPU) lengths and block numbers that do not match.
    """
    if q_THE.is_cuda:  # imported on first use: a CPU host need not have Triton
        from tightwire.kernels.cuda import attention as triton

        return triton.paged_attention(q_THE, k_cache_NKPE, v_cache_NKPE, sequences, form)
    attention = paged_attention_cpu if available() else paged_attention_reference
    return attention(q_THE, k_cache_NKPE, v_cache_NKPE, sequences, form)
