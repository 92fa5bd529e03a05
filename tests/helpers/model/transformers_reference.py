"""Answers of transformers, the reference of the parity tests."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.open import Checkpoint


def reference_of(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, *, of_blocks: bool = False
) -> LlamaForCausalLM:
    """transformers' model of the numbers that the checkpoint's weights stand for.

    ``of_blocks``: those of the packed blocks that ranks keep, which are other numbers if the import rounds again.
    """
    config, reader = checkpoint.config, checkpoint.reader()
    theirs = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_embeddings,
        architectures=["LlamaForCausalLM"],
    )
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config):
        tensors[name] = torch.empty(shape, dtype=torch.float32)
        rows = range(len(tensors[name]))
        packed = PACKED_FORMATS.get(reader.stored_as(name)) if of_blocks else None
        if packed is None:
            reader.read_into(tensors[name], name, rows=rows)
        else:
            blocks = PackedMatrix(torch.empty(len(rows), packed.row_bytes(shape[1]), dtype=torch.uint8), packed)
            reader.read_into(blocks, name, rows=rows)
            tensors[name] = dequantize_reference(blocks, torch.float32)
    return LlamaForCausalLM.from_pretrained(None, config=theirs, state_dict=tensors, dtype=dtype).eval()


@torch.inference_mode()
def logits(model: LlamaForCausalLM, prompt: Sequence[int]) -> Tensor:
    """(T, V) float32 at every position."""
    return model(torch.tensor([list(prompt)])).logits[0].float()


@torch.inference_mode()
def greedy_with_logits(folder: Path, num_prompt: int, num_tokens: int) -> tuple[list[int], Tensor]:
    """A prompt made from a seed and its greedy answer, without a cache; and the logits, (T, V), at every position but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    tokens = torch.randint(3, 300, (1, num_prompt), generator=torch.Generator().manual_seed(7))
    for _ in range(num_tokens):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0].tolist(), model(tokens[:, :-1]).logits[0]


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain greedy decoding with transformers' own cache; no end token stops it."""
    tokens = []
    is_new = "cache" in signature(LlamaForCausalLM.forward).parameters  # since transformers 5.24
    name = "cache" if is_new else "past_key_values"
    cache: dict[str, Any] = {name: DynamicCache(config=model.config)}
    inputs = torch.tensor([list(prompt)])
    for _ in range(num_tokens):
        output = model(inputs, use_cache=True, logits_to_keep=1, **cache)
        tokens.append(int(output.logits[0, -1].argmax()))
        inputs = torch.tensor([tokens[-1:]])
    return tokens
