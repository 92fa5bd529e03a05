"""Compares `tightwire serve` with the device's own rates and with transformers. Needs no installed peer.

    python -m tightwire.bench.peers.roofline random:llama-3-8b                        # on a GPU; some minutes
    python -m tightwire.bench.peers.roofline smollm2-135m --prompt-len 512 --crowd 8  # on a CPU

First it measures copies and matrix products on the idle device. Then one server gets three loads from `tightwire bench
serve`: short prompts one by one, whose later tokens each read all weights once; long prompts, whose first token takes all
products; and many requests at once. Then transformers generates with random weights of the same shape, a static cache and
torch.compile. Prints a Markdown table; the last line of stdout is one JSON object.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tightwire.bench.peers.arms import Arm
from tightwire.bench.peers.load import Load, LoadError, bench
from tightwire.bench.peers.process import PeerProcess, StartError, free_port
from tightwire.bench.report.environment import describe_environment
from tightwire.model.checkpoint.config import LlamaConfig, config_to_hf
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import Checkpoint, open_checkpoint

_TRANSFORMERS = Path(__file__).resolve().with_name("transformers_decode.py")
_SHORT_PROMPT = 128


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        checkpoint = open_checkpoint(given.model)
        rates = measure_rates(given.device)
        loads = measure_server(given, checkpoint)
        peer = None if given.no_peer else measure_transformers(given, checkpoint.config)
    except (ModelError, StartError, LoadError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"roofline: {error}\n")
        return 1
    result = summarize(given, checkpoint.config, rates, loads, peer)
    sys.stdout.write(_table(result) + "\n" + json.dumps(result) + "\n")
    return 0


def measure_rates(device: str) -> dict[str, float]:
    """Bytes a second read and written by a copy, and FLOP/s of bfloat16 products (on a CPU of float32, if that is faster)."""
    rates = {"copy_bytes_per_s": _copy_rate(device), "product_flops": _product_rate(device)}
    if device == "cuda":
        torch.cuda.empty_cache()  # the server, another process, needs the memory
    return rates


def _copy_rate(device: str) -> float:
    source = torch.zeros((4 << 30) if device == "cuda" else (1 << 29), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _least_s(lambda: target.copy_(source), device)


def _product_rate(device: str) -> float:
    size, dtypes = (8192, [torch.bfloat16]) if device == "cuda" else (2048, [torch.bfloat16, torch.float32])
    rates: list[float] = []
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rates.append(2 * size**3 / _least_s(partial(torch.matmul, a, b), device))
    return max(rates)


def _least_s(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_server(given: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The result of `bench serve` for each load.

    Raises:
        StartError, LoadError: the server did not start or did not answer.
    """
    longest = max(given.prompt_len + 2, _SHORT_PROMPT + given.output_len)
    command = [sys.executable, "-m", "tightwire", "serve", given.model, "--tp", str(given.tp), "--device", given.device]
    command += ["--dtype", "bfloat16", "--quantization", given.quantization, "--max-num-seqs", str(given.crowd)]
    command += ["--max-model-len", str(min(longest, checkpoint.config.max_positions)), "--prefix-cache", "none"]
    command += ["--max-num-batched-tokens", str(given.batched_tokens)]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = PeerProcess([*command, "--port", str(port)], {}, port=port, log=Path(folder) / "server.log")
        try:
            server.wait_ready("/health/ready", given.start_timeout)
            arm = Arm(name="tightwire", numbers="bfloat16", url=server.url)
            prompt = min(given.prompt_len, checkpoint.config.max_positions - 2)
            return {
                "one": _load(arm, 1, 3, _SHORT_PROMPT, given.output_len),
                "prompt": _load(arm, 1, 3, prompt, 2),
                "crowd": _load(arm, given.crowd, 2 * given.crowd, _SHORT_PROMPT, given.output_len // 2),
            }
        finally:
            server.stop()


def _load(arm: Arm, concurrency: int, requests: int, input_len: int, output_len: int) -> dict[str, Any]:
    load = Load(concurrency=(concurrency,), num_requests=(requests,), input_len=input_len, output_len=output_len)
    return bench(arm, arm.url, load, seed=1, output=None)["cells"][0]


def measure_transformers(given: argparse.Namespace, config: LlamaConfig) -> dict[str, float]:
    """Run transformers in a process of its own, so that its memory is freed.

    Raises:
        subprocess.SubprocessError: it failed; its error is on stderr.
    """
    shape = json.dumps(config_to_hf(config))
    command = [sys.executable, str(_TRANSFORMERS), shape, "--device", given.device]
    command += ["--prompt-len", str(_SHORT_PROMPT), "--output-len", str(given.output_len)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=given.start_timeout, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


def summarize(
    given: argparse.Namespace,
    config: LlamaConfig,
    rates: dict[str, float],
    loads: dict[str, dict[str, Any]],
    peer: dict[str, float] | None,
) -> dict[str, Any]:
    """Times and their share of the device's rates. Weights count as bfloat16, which a generated token must read once."""
    layers = config.num_layers * config.layer_matrix_elems
    weight_bytes = 2 * (layers + config.vocab_size * config.hidden_size)
    prompt_len = loads["prompt"]["prompt_tokens"] / loads["prompt"]["succeeded"]
    # Products with keys and with values, two operations each; the mask removes half of the square.
    in_attention = 2 * prompt_len**2 * config.num_layers * config.num_heads * config.head_dim
    prompt_flops = 2 * layers * prompt_len + in_attention
    token_s, ttft_s = loads["one"]["tpot_s"]["p50"], loads["prompt"]["ttft_s"]["p50"]
    return {
        "schema": "tightwire.bench.roofline/1",
        "environment": describe_environment(),
        "model": given.model,
        "tp": given.tp,
        "quantization": given.quantization,
        **rates,
        "weight_bytes": weight_bytes,
        "token_s": token_s,
        "token_share": weight_bytes / rates["copy_bytes_per_s"] / token_s,
        "prompt_tokens": prompt_len,
        "ttft_s": ttft_s,
        "prompt_share": prompt_flops / rates["product_flops"] / ttft_s,
        "crowd": given.crowd,
        "crowd_tokens_per_s": loads["crowd"]["output_tokens_per_s"],
        "transformers": peer,
        "times_as_fast": None if peer is None else peer["token_s"] / token_s,
    }


def _table(result: dict[str, Any]) -> str:
    copies, products = result["copy_bytes_per_s"] / 1e9, result["product_flops"] / 1e12
    title = f"{result['model']}, TP {result['tp']}, bfloat16, weights {result['quantization']}"
    rows = [
        (
            "a generated token, one request",
            f"{1e3 * result['token_s']:.2f} ms",
            f"{result['token_share']:.0%} of copies",
        ),
        (
            f"first token of {result['prompt_tokens']:.0f}",
            f"{1e3 * result['ttft_s']:.0f} ms",
            f"{result['prompt_share']:.0%} of products",
        ),
        (f"{result['crowd']} at once", f"{result['crowd_tokens_per_s']:.0f} tokens/s", ""),
    ]
    if peer := result["transformers"]:
        ratio = f"tightwire is {result['times_as_fast']:.2f} times as fast"
        rows.append(("a generated token, transformers", f"{1e3 * peer['token_s']:.2f} ms", ratio))
    lines = [" | ".join(("", *row, "")).strip() for row in rows]
    head = f"{title}: copies read and write {copies:.0f} GB/s, products {products:.2f} TFLOP/s"
    return "\n".join([head, "", "| load | time | share of the device's rate |", "|---|--:|--:|", *lines])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare serving with the device's own rates and with transformers.")
    add = parser.add_argument
    add("model", nargs="?", default="random:llama-3-8b", help="see `tightwire serve` (%(default)s)")
    devices = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu", "cuda")
    add("--device", default=devices[0], choices=devices, help="(%(default)s)")
    add("--tp", type=int, default=1, help="ranks (%(default)s)")
    add("--quantization", default="none", help="see `tightwire serve` (%(default)s)")
    add(
        "--prompt-len",
        type=int,
        default=8190,
        help="tokens of the long prompt, at most the model's context (%(default)s)",
    )
    add("--output-len", type=int, default=64, help="tokens to generate (%(default)s)")
    add("--crowd", type=int, default=64, help="requests in flight (%(default)s)")
    add("--batched-tokens", type=int, default=8192, help="--max-num-batched-tokens of the server (%(default)s)")
    add("--no-peer", action="store_true", help="do not measure transformers")
    add(
        "--start-timeout",
        type=float,
        default=240.0,
        metavar="S",
        help="limit for the start of the server and for transformers (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
