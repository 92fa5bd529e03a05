"""Converts one GGUF file to the folder that vLLM and transformers read. ``run`` starts it in the environment of transformers.

    PEERS/transformers/bin/python bench/lab/peers/convert_weights.py MODEL.gguf FOLDER

Makes ``FOLDER/hf``: bfloat16 safetensors and a tokenizer. Every matrix is dequantized and rounded once to 16 bits, as
`tightwire serve --quantization none` does.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def make_folder(source: Path, target: Path) -> None:
    """Write a Hugging Face folder in bfloat16. `transformers serve` has no ``ignore_eos``, so generation_config.json names no
    end token: every answer runs to the requested length."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=plain, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]), Path(sys.argv[2]) / "hf")
