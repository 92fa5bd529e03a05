"""The peer that everybody has: transformers' `generate`, on the same weights, prompts and lengths as `bench serve`.

    python benchmarks/peers/transformers_generate.py MODEL [--dtype bfloat16|float32] [--threads N] [--batch-size 1,16]

MODEL is a Hugging Face folder or repo id, or a .gguf file (which transformers dequantizes itself). Prompts come from
the bench's own synthetic workload: the same seed, length and order give the same prompts there and here. A batch is
one static batch of prompts of equal length, so nothing is padded.

Measured as a client of a library can: the clock starts with the text, tokenization included; TTFT is when the first
token reaches a streamer; every further token is stamped on its way through it. There is no HTTP and no second process
to pay for here. Warm-up calls come first and do not count. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from tightwire.server.bench.environment import describe_environment
from tightwire.server.bench.serve.workload import SyntheticWorkload

CHECK_PROMPT = "The capital of France is"


@dataclass(kw_only=True)
class Clock(BaseStreamer):
    """Stamps each token as `generate` hands it over; the first call brings the prompt."""

    stamps: list[float] = field(default_factory=list)
    _seen_prompt: bool = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.stamps.append(time.perf_counter())
        self._seen_prompt = True

    def end(self) -> None:
        pass


class Peer:
    """A model ready to generate, and the seconds from the start of this process until it was."""

    def __init__(self, model: str, dtype: str) -> None:
        path = Path(model)
        where: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        # transformers may multiply by packed weights, in float32; plain ones are its fastest form and serve uses them too.
        packing = getattr(transformers, "GgufConfig", None) if "gguf_file" in where else None
        plain: dict[str, Any] = {"quantization_config": packing(dequantize=True)} if packing else {}
        self.model: Any = AutoModelForCausalLM.from_pretrained(**where, **plain, dtype=getattr(torch, dtype)).eval()
        # No end tokens: every answer runs to its length, as with ignore_eos, and no processor has to suppress them.
        self.model.generation_config.eos_token_id = None
        self.ready_s = seconds_since_start()

    def count(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])

    def generate(self, texts: Sequence[str], output_len: int) -> tuple[float, list[float]]:
        """When a greedy batch began, and when each of its tokens came."""
        clock = Clock()
        began = time.perf_counter()
        inputs = self.tokenizer(list(texts), return_tensors="pt")
        # A streamer takes one sequence; for a batch the same stamps come from a stopping rule that never stops.
        watch: dict[str, Any] = {"streamer": clock}
        if len(texts) > 1:
            watch = {"stopping_criteria": [_Stamps(clock)]}
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=output_len, do_sample=False, pad_token_id=0, **watch)
        generated = output.shape[1] - inputs["input_ids"].shape[1]
        if generated != output_len or len(clock.stamps) != output_len:
            raise RuntimeError(f"asked for {output_len} tokens, got {generated} with {len(clock.stamps)} stamps")
        return began, clock.stamps

    def check(self) -> dict[str, str]:
        """A greedy answer to a plain prompt, for comparing with a server's: a fast wrong answer is worth nothing."""
        inputs = self.tokenizer(CHECK_PROMPT, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        text = self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return {"prompt": CHECK_PROMPT, "text": text}


class _Stamps(transformers.StoppingCriteria):
    """Called once per token of the whole batch."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self._clock.stamps.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def seconds_since_start() -> float:
    """How long this process has run, the import of its libraries included (Linux)."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def measure(peer: Peer, given: argparse.Namespace, batch_size: int, num_batches: int) -> dict[str, Any]:
    """Medians over ``num_batches`` calls after the warm-ups."""
    workload = SyntheticWorkload(num_words=given.input_len, output_len=given.output_len, seed=given.seed)
    _fit(peer, workload, given.input_len)
    ttft_s, tpot_s, tokens_per_s = [], [], []
    for number in range(given.warmups + num_batches):
        texts = [str(prompt.content) for prompt in workload.take(batch_size)]
        began, stamps = peer.generate(texts, given.output_len)
        if number < given.warmups:
            continue
        ttft_s.append(stamps[0] - began)
        tpot_s.append((stamps[-1] - stamps[0]) / max(1, len(stamps) - 1))
        tokens_per_s.append(batch_size * len(stamps) / (stamps[-1] - began))
    return {
        "batch_size": batch_size,
        "batches": num_batches,
        "ttft_p50_s": statistics.median(ttft_s),
        "tpot_p50_s": statistics.median(tpot_s),
        "decode_tokens_per_s": batch_size / statistics.median(tpot_s) if given.output_len > 1 else None,
        "output_tokens_per_s": statistics.median(tokens_per_s),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "batch_output_tokens_per_s": tokens_per_s,
    }


def _fit(peer: Peer, workload: SyntheticWorkload, input_len: int) -> None:
    """Make prompts ``input_len`` tokens long, special tokens included, as `bench serve` does by the server's count."""
    for attempt in range(6):
        counted = peer.count(str(workload.probe(attempt).content))
        if counted == input_len:
            return
        workload.num_words = max(1, workload.num_words + input_len - counted)
    raise SystemExit(f"cannot make prompts of {input_len} tokens with this tokenizer")


def _sizes(given: argparse.Namespace) -> list[tuple[int, int]]:
    """Each batch size with its number of measured calls: one number for all, or one for each."""
    numbers = given.num_batches if len(given.num_batches) > 1 else given.num_batches * len(given.batch_size)
    if len(numbers) != len(given.batch_size) or min([*numbers, *given.batch_size]) < 1:
        raise SystemExit("--num-batches takes one number above 0, or one for each --batch-size")
    return list(zip(given.batch_size, numbers, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = Peer(given.model, given.dtype)
    result = {
        "schema": "tightwire.bench.peer/1",
        "peer": f"transformers {transformers.__version__}",
        "model": Path(given.model).name,
        "dtype": given.dtype,
        "threads": given.threads,
        "input_len": given.input_len,
        "output_len": given.output_len,
        "seed": given.seed,
        "ready_s": peer.ready_s,
        "check": peer.check(),
        "runs": [measure(peer, given, size, number) for size, number in _sizes(given)],
        "environment": describe_environment(),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="transformers generate, measured as bench serve measures a server.")
    parser.add_argument("model", help="a Hugging Face folder or repo id, or a .gguf file")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(%(default)s)")
    parser.add_argument("--batch-size", type=_integers, default=[1], metavar="N,N", help="(1)")
    parser.add_argument("--input-len", type=int, default=512, help="prompt tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate (%(default)s)")
    parser.add_argument("--num-batches", type=_integers, default=[5], metavar="N,N", help="measured calls for each (5)")
    parser.add_argument("--warmups", type=int, default=1, help="calls before them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
