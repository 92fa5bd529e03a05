"""Times transformers' `generate` in a process of its own, for ``roofline``: random weights, one sequence, static cache, compiled.

    python transformers_child.py CONFIG_JSON [--device cpu|cuda] [--prompt-len N] [--output-len N]

The last line of stdout is one JSON object.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    given = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(given.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**json.loads(given.config))).eval()
    model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    prompt = torch.ones(1, given.prompt_len, dtype=torch.long, device=given.device)

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
        if given.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for num_tokens in (given.output_len, given.output_len, 2):
        seconds(num_tokens)  # compiles
    each = [(seconds(given.output_len) - seconds(2)) / (given.output_len - 2) for _ in range(3)]
    sys.stdout.write(json.dumps({"token_s": statistics.median(each)}) + "\n")


if __name__ == "__main__":
    main()
