"""Writes a GGUF file of random 4-bit weights that four ranks can share: 8 heads, 4 of keys and values, 239 M parameters.

    python tools/random_gguf.py TOKENIZER.gguf OUT.gguf
    tightwire bench lab peers --model OUT.gguf --nnodes 4 --link 200mbit --servers tightwire-tp4-q4,llama.cpp-rpc-q4

The tokenizer is the other file's. Its ids are those of the new model, so both have the same vocabulary.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 16, 1024, 8, 4, 128, 2816
_KIND = gguf.GGMLQuantizationType.Q4_1
_STD = 0.02


def write(source: Path, target: Path) -> None:
    writer, random = gguf.GGUFWriter(target, "llama"), np.random.default_rng(0)
    num_tokens = _copy_tokenizer(source, writer)
    for add, number in (
        *((writer.add_block_count, _LAYERS), (writer.add_context_length, 8192), (writer.add_vocab_size, num_tokens)),
        *((writer.add_embedding_length, _HIDDEN), (writer.add_feed_forward_length, _MLP)),
        *((writer.add_head_count, _HEADS), (writer.add_head_count_kv, _KV_HEADS)),
        *((writer.add_rope_dimension_count, _HEAD_DIM), (writer.add_file_type, gguf.LlamaFileType.MOSTLY_Q4_1)),
    ):
        add(number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    query, key = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    matrices = {"attn_q": (query, _HIDDEN), "attn_k": (key, _HIDDEN), "attn_v": (key, _HIDDEN)}
    matrices |= {"attn_output": (_HIDDEN, query), "ffn_gate": (_MLP, _HIDDEN), "ffn_up": (_MLP, _HIDDEN)}
    matrices |= {"ffn_down": (_HIDDEN, _MLP)}
    shapes = {"token_embd": (num_tokens, _HIDDEN), "output_norm": (_HIDDEN,)}  # the embedding is also the head
    for layer in (f"blk.{number}" for number in range(_LAYERS)):
        shapes |= {f"{layer}.{name}": (_HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{layer}.{name}": shape for name, shape in matrices.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            values = quantize(random.standard_normal(shape, np.float32) * _STD, _KIND)
            writer.add_tensor(f"{name}.weight", values, raw_dtype=_KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> int:
    """Copy the fields of the tokenizer; returns the size of the vocabulary."""
    num_tokens = 0
    for name, field in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
            num_tokens = len(field.data) if name == "tokenizer.ggml.tokens" else num_tokens
    return num_tokens


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
