"""Converts one GGUF file to the folder that vLLM and transformers read. ``run`` starts it in the environment of transformers.

    PEERS/transformers/bin/python bench/peers/convert_weights.py MODEL.gguf FOLDER

Makes ``FOLDER/hf``: bfloat16 safetensors and a tokenizer. Every matrix is dequantized and rounded once to 16 bits, as
`tightwire serve --quantization none` does.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert one GGUF file to a bfloat16 Hugging Face folder.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    make_folder(given.gguf, given.folder / "hf")
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


if __name__ == "__main__":
    sys.exit(main())
