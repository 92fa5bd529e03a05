"""Times transformers in a process of its own; ``roofline`` and ``offload`` start it, in the peer's environment if need be.

``generate CONFIG_JSON`` times `generate` with random weights: one sequence, static cache, compiled. The last line of stdout
is one JSON object.

``offload MODEL`` times decode steps with accelerate's offloading. Each line of stdin is an order as JSON, ``{"arm", "batch",
"steps"}``; the answer is a line of stdout, ``{"seconds": [...], "tokens": [...]}``. Arms: resident, cpu (``cpu_offload``), disk
(``disk_offload``). As in Tightwire, only the layers are offloaded; embedding, last norm and head stay on the device.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("generate", "offload"))
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.mode == "generate":
        generate(given)
    else:
        offload(given)
    return 0


def generate(given: argparse.Namespace) -> None:
    torch.set_default_dtype(getattr(torch, given.dtype))
    with torch.device(given.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**json.loads(given.model))).eval()
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
        _synchronize(given.device)
        return time.perf_counter() - start

    for num_tokens in (given.output_len, given.output_len, 2):
        seconds(num_tokens)  # compiles
    each = [(seconds(given.output_len) - seconds(2)) / (given.output_len - 2) for _ in range(3)]
    _print({"token_s": statistics.median(each)})


def offload(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = {arm: _load(given, arm, folder) for arm in ("resident", "cpu", "disk")}
        _print({"ready": sorted(models)})
        for line in sys.stdin:
            order = json.loads(line)
            with torch.inference_mode():
                _print(_steps(models[order["arm"]], given, order["batch"], order["steps"]))


def _load(given: argparse.Namespace, arm: str, folder: str) -> Any:
    from accelerate import cpu_offload, disk_offload  # pyright: ignore[reportMissingImports] - of the peer's environment

    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    if arm == "resident":
        return model.to(given.device)
    for part in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb, model.lm_head):
        part.to(given.device)
    device = torch.device(given.device)
    if arm == "cpu":
        cpu_offload(model.model.layers, execution_device=device)
    else:
        disk_offload(model.model.layers, folder, execution_device=device)
    return model


def _steps(model: Any, given: argparse.Namespace, batch: int, steps: int) -> dict[str, Any]:
    """Greedy decode steps after a prompt; the first step is not timed."""
    prompt = torch.arange(3, 3 + given.prompt_len, device=given.device).repeat(batch, 1)
    done = model(prompt, use_cache=True)
    cache, tokens_B1 = done.past_key_values, done.logits[:, -1:].argmax(-1)
    tokens, seconds = [int(tokens_B1[0])], []
    for number in range(1 + steps):
        _synchronize(given.device)
        start = time.perf_counter()
        done = model(tokens_B1, past_key_values=cache, use_cache=True)
        tokens_B1 = done.logits[:, -1:].argmax(-1)
        tokens.append(int(tokens_B1[0]))
        _synchronize(given.device)
        if number:
            seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "tokens": tokens}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _print(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
