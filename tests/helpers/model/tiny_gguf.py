"""The tiny Llama as a .gguf, written the way llama.cpp's converter writes one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quantize
from tiny import tiny_config, tiny_tensors

from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.tensors import gguf_name
from tightwire.model.text.tokenizer import BOS_ID, CHAT_TEMPLATE, byte_backend

# gguf-py decodes these but cannot make them; a test takes random blocks of them instead.
_NOT_QUANTIZABLE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_S")


def make_tiny_gguf(
    path: Path,
    quant: str = "F32",
    *,
    seed: int = 0,
    others: Mapping[str, str] | None = None,
    part_tensors: int = 0,
    **overrides: Any,
) -> Path:
    """Write the tiny model of ``overrides`` (keys of config.json) as ``path``; matrices in ``quant``, vectors F32.

    ``others``: types of the matrices whose names have such a part (``attn_v``).

    Rows must be whole blocks: hidden and MLP sizes multiples of 32, or of 256 for the K types.
    ``part_tensors``: split into parts of so many tensors, and return the first one's path; 0: one file.
    """
    raw_config = tiny_config(**overrides)
    config = config_from_hf(raw_config)
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part_tensors)
    write_sizes(writer, config)
    writer.add_vocab_size(config.vocab_size)
    if config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    write_tokenizer(writer, config)
    generator = np.random.default_rng(seed)
    for name, tensor in tiny_tensors(raw_config, seed).items():
        own_name = gguf_name(name)
        assert own_name is not None
        if ".q_proj." in name or ".k_proj." in name:
            tensor = interleave(tensor, config.head_dim)
        kinds = [kind for part, kind in (others or {}).items() if part in own_name]
        kind = gguf.GGMLQuantizationType[kinds[0] if kinds else quant]
        if tensor.dim() == 1:
            writer.add_tensor(own_name, tensor.numpy())
        elif kind.name in _NOT_QUANTIZABLE:
            writer.add_tensor(own_name, random_blocks(generator, tuple(tensor.shape), kind), raw_dtype=kind)
        else:
            writer.add_tensor(own_name, quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
    if config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.is_file() else min(path.parent.glob(f"{path.stem}-*.gguf"))


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp's order of query and key rows. Source: ``permute`` of its convert_hf_to_gguf.py."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).contiguous()


# The mean of the codes of formats whose minima take it away.
_MEAN_CODES = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def random_blocks(
    generator: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    """Random bytes, of which any are valid; the float16 scales make numbers of the size that ``tiny_tensors`` have."""
    block_elems, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block_elems, block_bytes), dtype=np.uint8)
    packed = PACKED_FORMATS.get(kind.name)
    floats_at = packed.floats_at if packed else 0

    def set_scale(scale: float) -> None:
        blocks[..., floats_at : floats_at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if packed and packed.has_minimum:
            minimum = np.float16(scale * _MEAN_CODES[kind.name])
            blocks[..., floats_at + 2 : floats_at + 4] = np.frombuffer(minimum.tobytes(), np.uint8)

    set_scale(2**-8)
    size = dequantize(blocks.reshape(-1, block_bytes)[:64], kind).std()
    set_scale(2**-8 * shape[-1] ** -0.5 / size)
    return blocks.reshape(*shape[:-1], -1)


def write_sizes(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim or config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)


def write_tokenizer(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    backend = byte_backend(config.vocab_size)
    tokens = [backend.id_to_token(i) or "" for i in range(config.vocab_size)]
    special = set(backend.get_added_tokens_decoder())
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i in special else normal for i in range(config.vocab_size)])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _rope_divisors(config: LlamaConfig) -> npt.NDArray[np.float32]:
    wavelengths = [2 * np.pi * config.rope_theta ** (2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    scaling = config.rope_scaling
    bounds = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.interp(scaling.original_max_positions / np.array(wavelengths), bounds, (0.0, 1.0))
    return (1 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)
