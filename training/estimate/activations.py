"""What forward keeps for backward, found by running the modules on the meta device: shapes without memory or arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface

from tightwire.model.config import LlamaConfig
from tightwire.training.start.model import build_model

_META = torch.device("meta")
_ATTENTION = "tightwire-kept"  # as transformers is to know the stand-in


def activation_bytes(
    config: LlamaConfig, *, sequences: int, sequence_tokens: int, dtype: torch.dtype, checkpoint_every: int = 0
) -> int:
    """Of one micro-batch on one rank, at the end of its forward; with checkpointing also what one block is recomputed to.

    Tensors that several operations keep are counted once, weights never. Kernels' own working memory is not known.
    """
    # On the meta device torch would take its plain attention, which keeps all scores; real devices have fused ones.
    AttentionInterface.register(_ATTENTION, _attention)
    model: Any = build_model(replace(config, num_layers=1), device=torch.device("cpu"))
    model.to(dtype)
    model.config._attn_implementation = _ATTENTION
    hidden_BSD = torch.empty(
        sequences, sequence_tokens, config.hidden_size, dtype=dtype, device=_META, requires_grad=True
    )
    cos_sin = torch.empty(2, 1, sequence_tokens, config.head_dim, dtype=dtype, device=_META).unbind()
    targets_N = torch.empty(sequences * sequence_tokens, dtype=torch.int64, device=_META)

    def block() -> Any:
        return model.model.layers[0](hidden_BSD, attention_mask=None, position_embeddings=cos_sin)

    def rest() -> Any:
        logits_BSV = model.lm_head(model.model.norm(hidden_BSD)).float()
        return cross_entropy(logits_BSV.flatten(0, 1), targets_N)

    of_block, of_rest = _kept_bytes(model, block), _kept_bytes(model, rest)
    checkpointed = -(-config.num_layers // checkpoint_every) if checkpoint_every else 0
    kept = (config.num_layers - checkpointed) * of_block + checkpointed * hidden_BSD.nbytes + of_rest
    return kept + (of_block if checkpointed else 0)


class _FusedAttention(torch.autograd.Function):
    """Keeps what fused kernels keep: queries, keys, values, the result, and one number for each query and head."""

    @staticmethod
    def forward(ctx: Any, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor) -> Tensor:
        sequences, heads, tokens, width = q_BHSE.shape
        out_BHSE = q_BHSE.new_empty(sequences, tokens, heads, width).transpose(1, 2)
        ctx.save_for_backward(q_BHSE, k_BKSE, v_BKSE, out_BHSE, q_BHSE.new_empty(q_BHSE.shape[:3], dtype=torch.float32))
        return out_BHSE


def _attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return _FusedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _kept_bytes(model: torch.nn.Module, run: Callable[[], Any]) -> int:
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Any] = {}  # storages by identity; held, so that no identity is used again

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())
