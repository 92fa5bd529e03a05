"""Names and shapes of a Llama's tensors, in Hugging Face's form (used everywhere) and in GGUF's."""

import re
from collections.abc import Iterator

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import CheckpointReader

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_GGUF_OUTER = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str | None:
    """Return e.g. ``blk.3.ffn_up.weight`` for ``model.layers.3.mlp.up_proj.weight``; None if there is no such name."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\w+)", hf_name)
    if match is None or match[2] not in _GGUF_LAYER:
        return _GGUF_OUTER.get(hf_name)
    return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}.{match[3]}"


def expected_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every tensor that the model needs, with its unsplit shape."""
    hidden = config.hidden_size
    yield EMBEDDING, (config.vocab_size, hidden)
    for index in range(config.num_layers):
        for name, shape in _layer_tensors(config):
            yield f"model.layers.{index}.{name}", shape
    yield FINAL_NORM, (hidden,)
    if not config.tied_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def _layer_tensors(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, mlp = config.hidden_size, config.mlp_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    inputs = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    inputs |= {"mlp.gate_proj": mlp, "mlp.up_proj": mlp}
    shapes = {name: (rows, hidden) for name, rows in inputs.items()}
    shapes |= {"self_attn.o_proj": (hidden, query), "mlp.down_proj": (hidden, mlp)}
    for name, (rows, columns) in shapes.items():
        yield f"{name}.weight", (rows, columns)
        if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
            yield f"{name}.bias", (rows,)


def check_tensors(reader: CheckpointReader, config: LlamaConfig) -> None:
    """Raise ModelError if a tensor is missing, has another shape, or has an unsupported type."""
    for name, want in expected_tensors(config):
        found = reader.shape(name)
        if found != want:
            raise ModelError(f"tensor {name} has shape {found}, but the model's configuration requires {want}")
