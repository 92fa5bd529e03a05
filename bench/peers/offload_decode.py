"""Times decode steps of transformers with accelerate's offloading. ``streaming`` starts it in the peer's environment.

Each line of stdin is an order as JSON, ``{"arm", "batch", "steps"}``; the answer is a line of stdout, ``{"seconds": [...],
"tokens": [...]}``. Arms: resident, cpu (``cpu_offload``), disk (``disk_offload``). As in Tightwire, only the layers are
offloaded; embedding, last norm and head stay on the device.
"""

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload  # pyright: ignore[reportMissingImports] - of the peer's environment
from transformers import AutoModelForCausalLM


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        models = {arm: _load(given, arm, folder) for arm in ("resident", "cpu", "disk")}
        _say({"ready": sorted(models)})
        for line in sys.stdin:
            order = json.loads(line)
            with torch.inference_mode():
                _say(_steps(models[order["arm"]], given, order["batch"], order["steps"]))
    return 0


def _load(given: argparse.Namespace, arm: str, folder: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    if arm == "resident":
        return model.to(given.device)
    layers = model.model.layers
    for part in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb, model.lm_head):
        part.to(given.device)
    device = torch.device(given.device)
    if arm == "cpu":
        cpu_offload(layers, execution_device=device)
    else:
        disk_offload(layers, folder, execution_device=device)
    return model


def _steps(model: Any, given: argparse.Namespace, batch: int, steps: int) -> dict[str, Any]:
    """Greedy decode steps after a prompt that fills the context; the first step is not timed."""
    prompt = torch.arange(3, 3 + given.context - 1, device=given.device).repeat(batch, 1)
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


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
