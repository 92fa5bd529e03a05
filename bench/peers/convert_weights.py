"""Converts one GGUF file to the forms that the peers read. ``run`` starts it in the environment of transformers.

    PEERS/transformers/bin/python bench/peers/convert_weights.py MODEL.gguf FOLDER

Makes ``FOLDER/hf`` (bfloat16 safetensors and a tokenizer, for vLLM and transformers), and ``FOLDER/f16.gguf`` and
``FOLDER/bf16.gguf`` for llama.cpp. Every matrix is dequantized and rounded once to 16 bits, as `tightwire serve
--quantization none` does.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_GGUF_TYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}
_WRITERS_OWN = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type"}


def main() -> int:
    parser = argparse.ArgumentParser(description="One GGUF as a bfloat16 Hugging Face folder and as 16-bit GGUF files.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    make_folder(given.gguf, given.folder / "hf")
    for name in _GGUF_TYPES:
        make_gguf(given.gguf, given.folder / f"{name}.gguf", name)
    return 0


def make_folder(source: Path, target: Path) -> None:
    """Write a Hugging Face folder in bfloat16. `transformers serve` has no ``ignore_eos``, so generation_config.json names no
    end token: every answer runs to the requested length."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=plain, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def make_gguf(source: Path, target: Path, name: str) -> None:
    """Write the same file with 16-bit matrices; vectors stay float32."""
    matrices, file_type = _GGUF_TYPES[name]
    reader = GGUFReader(source)
    unfinished = target.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, arch=str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(file_type)
    for field in reader.fields.values():
        if field.name not in _WRITERS_OWN:
            kind = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = matrices if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


if __name__ == "__main__":
    sys.exit(main())
