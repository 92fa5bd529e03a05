"""``tightwire bench lab roofline``: profiles a step and `tightwire serve` against the device's own rates, and against transformers.

README.md says what is measured: copies and products, the parts of a step (``layer_parts``), a server, and transformers.
"""

import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tightwire.bench.lab.peers.layer_parts import WHOLE, Part, StepShape, measure_parts, time_transformers
from tightwire.bench.lab.peers.options import RooflineOptions
from tightwire.bench.lab.peers.process import Load, bench_serve
from tightwire.bench.options import RankOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench
from tightwire.bench.server_process import ServerFailedError, ServerProcess
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.kernels.cpu.library import has_pairs
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights.formats import choose_formats, weight_bytes

_SHORT_PROMPT, _SHOWN = 128, ("model", "tp", "quantization")
_MS, _SHARE, _RATE = Column("ms", "seconds", ",.2f", 1e3), Column("share", "share", ".0%"), Column("of", "rate")
_TOKENS = Column("tokens/s", "tokens_per_s", ",.1f")
_PART_COLUMNS = (
    Column("part", "part"),
    *(_MS, _SHARE, _RATE),
    Column("calls", "calls", "d"),
    Column("MB", "bytes", ",.2f", 1e-6),
    Column("GFLOP", "flops", ",.3f", 1e-9),
)
_SERVED_COLUMNS = (Column("load", "name"), _MS, _TOKENS, _SHARE, _RATE)
_LEGEND = (
    "Share: the time that the bytes, or the operations, take at the device's rates, whichever is longer, of the part's time. "
    "Small activations stay in a cache, so a share may exceed 100 %. A CPU serves a decode step as one call, without timers: "
    "its parts are the same kernels called one by one. Sums include the wait for the slowest rank."
)


class RooflineBench(Bench[RooflineOptions]):
    verb = "roofline"
    of_lab = True
    metrics = (Metric(name="seconds", unit="ms", scale=1e3),)
    columns = (Column("load", "name"), *_PART_COLUMNS[1:], _TOKENS)
    failures = ((ModelError, 2), (ServerFailedError, 1), (LocalRankError, 1))

    def measure(self) -> None:
        options = self.options
        checkpoint = open_checkpoint(options.model)
        rates = measure_rates(_device_of(options), options.rate_size)
        torch.cuda.empty_cache()  # the server, another process, needs the memory
        self.facts = {name: getattr(options, name) for name in _SHOWN} | {"device": _device_of(options), **rates}
        copies, products = rates["copy_bytes_per_s"] / 1e9, rates["product_flops"] / 1e12
        self.print(f"copies read and write {copies:.0f} GB/s, products {products:.2f} TFLOP/s", "")
        served: list[dict[str, Any]] = []
        if options.server:
            loads = _measure_server(options, checkpoint)
            served += summarize(checkpoint.config, rates, loads, bytes_of_token(checkpoint, options.quantization))
        if options.peer:
            # A process of its own frees the memory.
            own = RankOptions(ranks=1, device=_device_of(options), timeout_s=options.start_timeout)
            with open_ranks(own) as (ranks, _):
                ((_, token_s),) = ranks.stream(time_transformers, checkpoint.config, _SHORT_PROMPT, options.output_len)
            name = "a generated token, transformers"
            served.append({"name": name, "seconds": token_s, "samples": {"seconds": [token_s]}})
        if served:
            self.measured += served
            self.print_table(Table(title="Over HTTP", columns=_SERVED_COLUMNS, rows=served))
        self._measure_parts(rates, checkpoint.config.max_positions)  # last: what is interrupted keeps the whole steps
        if options.server and options.peer:
            self.facts["times_as_fast"] = served[-1]["seconds"] / served[0]["seconds"]
            self.print(f"tightwire is {self.facts['times_as_fast']:.2f} times as fast as transformers")

    def _measure_parts(self, rates: dict[str, float], max_positions: int) -> None:
        """A table for each load, with the times of rank 0."""
        options, is_cuda = self.options, _device_of(self.options) == "cuda"
        prompt_len = min(options.prompt_len, options.batched_tokens, max_positions)
        shapes = [
            StepShape(f"a prompt of {prompt_len}", sequences=1, tokens=prompt_len, is_decode=False),
            StepShape("a generated token", sequences=1, tokens=_SHORT_PROMPT, is_decode=True),
            StepShape(f"{options.crowd} tokens at once", sequences=options.crowd, tokens=_SHORT_PROMPT, is_decode=True),
        ]
        how = options.model, options.quantization, "native" if is_cuda else "two-shot", shapes
        own = rates if is_cuda else {name: rate / options.tp for name, rate in rates.items()}  # ranks share the cores
        with open_ranks(RankOptions(ranks=options.tp, device=_device_of(options))) as (ranks, _):
            for rank, (shape, parts) in ranks.stream(measure_parts, *how):
                if rank == 0:
                    rows = part_rows(shape.name, parts, own)
                    self.measured += rows
                    self.print_table(Table(title=f"Parts of {shape.name}", columns=_PART_COLUMNS, rows=rows))
        self.print(_LEGEND, "", style="dim")

    def title(self, result: Any) -> tuple[str, str]:
        model = f"{result['model']}, TP {result['tp']}, quantization {result['quantization']}"
        return "Serving compared with the device's own rates", model


def measure_rates(device: str, size: int | None = None) -> dict[str, float]:
    """Bytes a second read and written by a copy, and FLOP/s of products: bfloat16's, or on a CPU float32's if they are faster."""
    is_cuda = device == "cuda"
    size, product_s = size or (8192 if is_cuda else 2048), list[float]()
    source = torch.zeros((64 if is_cuda else 128) * size**2, dtype=torch.uint8, device=device)
    copy_s = _least_s(partial(torch.empty_like(source).copy_, source), device)
    # Where a CPU has no instructions for bfloat16, torch's product takes 100 times as long.
    for dtype in [torch.bfloat16] if is_cuda else [torch.float32, torch.bfloat16][: 1 + has_pairs()]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product_s.append(_least_s(partial(torch.matmul, a, b), device))
    return {"copy_bytes_per_s": 2 * source.numel() / copy_s, "product_flops": 2 * size**3 / min(product_s)}


def _least_s(work: Callable[[], object], device: str) -> float:
    def timed() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return min(timeit.repeat(timed, number=1, repeat=64 if device == "cuda" else 8))  # a GPU's clock rises under load


def _device_of(options: RooflineOptions) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device


def _measure_server(options: RooflineOptions, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    max_positions = checkpoint.config.max_positions
    longest = min(max(options.prompt_len + 2, _SHORT_PROMPT + options.output_len) * 11 // 10, max_positions)
    command = [sys.executable, "-m", "tightwire", "serve", options.model, "--tp", str(options.tp), "--port", "{port}"]
    command += ["--device", _device_of(options), "--dtype", "bfloat16", "--quantization", options.quantization]
    command += ["--max-num-seqs", str(options.crowd), "--max-model-len", str(longest), "--prefix-cache", "none"]
    command += ["--max-num-batched-tokens", str(options.batched_tokens)]

    def load(concurrency: int, requests: int, input_len: int, output_len: int) -> dict[str, Any]:
        load = Load(concurrency=(concurrency,), num_requests=(requests,), input_len=input_len, output_len=output_len)
        return bench_serve(server.url, load, seed=1)["cells"][0]

    with tempfile.TemporaryDirectory() as folder, ServerProcess(command, {}, log=Path(folder) / "server.log") as server:
        server.wait_ready("/health/ready", options.start_timeout)
        return {
            "one": load(1, 3, _SHORT_PROMPT, options.output_len),
            "prompt": load(1, 3, min(options.prompt_len, max_positions - 2), 2),
            "crowd": load(options.crowd, 2 * options.crowd, _SHORT_PROMPT, options.output_len // 2),
        }


def part_rows(load: str, parts: dict[str, Part], rates: dict[str, float]) -> list[dict[str, Any]]:
    """The parts of a step, their sum, and the step as served, with one rank's ``rates``."""
    rows = []
    for name, part in sorted(parts.items(), key=lambda item: item[0] == WHOLE):
        if name == WHOLE:
            part.num_bytes, part.flops = (sum(row[key] for row in rows) for key in ("bytes", "flops"))
            rows.append({"part": "sum of the parts", "seconds": sum(row["seconds"] for row in rows), "samples": {}})
        copy_s, product_s = part.num_bytes / rates["copy_bytes_per_s"], part.flops / rates["product_flops"]
        seconds, rate = median(part.seconds), "copies" if copy_s > product_s else "products"
        row = {"part": name, "seconds": seconds, "share": max(copy_s, product_s) / seconds, "rate": rate}
        row |= {"calls": part.calls, "bytes": part.num_bytes, "flops": part.flops}
        rows.append({**row, "samples": {"seconds": part.seconds}})
    return [{"name": f"{load}: {row['part']}", **row} for row in rows]


def bytes_of_token(checkpoint: Checkpoint, quantization: str) -> int:
    """The bytes of weights that a generated token reads: all but an embedding table that is not the head's too."""
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, quantization)
    table = 0 if config.tied_embeddings else 2 * config.vocab_size * config.hidden_size
    return weight_bytes(config, make_layout(config, 1).shards[0], formats, elem_bytes=2) - table


def summarize(
    config: LlamaConfig, rates: dict[str, float], loads: dict[str, dict[str, Any]], token_bytes: int
) -> list[dict[str, Any]]:
    """Times and their share of the device's rates. A generated token must read ``token_bytes`` of weights once."""
    layers = config.num_layers * config.layer_matrix_elems
    prompt_len = loads["prompt"]["prompt_tokens"] / loads["prompt"]["succeeded"]
    # Products with keys and with values, two operations each; the mask removes half of the square.
    in_attention = 2 * prompt_len**2 * config.num_layers * config.num_heads * config.head_dim
    prompt_flops = 2 * layers * prompt_len + in_attention
    token_s, ttft_s = loads["one"]["tpot_s"]["p50"], loads["prompt"]["ttft_s"]["p50"]
    crowd = loads["crowd"]
    copies_s, products_s = token_bytes / rates["copy_bytes_per_s"], prompt_flops / rates["product_flops"]
    return [
        _served("a generated token, one request", token_s, copies_s, "copies"),
        _served(f"first token of {prompt_len:.0f}", ttft_s, products_s, "products"),
        {"name": f"{crowd['concurrency']} at once", "tokens_per_s": crowd["output_tokens_per_s"], "samples": {}},
    ]


def _served(name: str, seconds: float, least_s: float, rate: str) -> dict[str, Any]:
    row = {"name": name, "seconds": seconds, "share": least_s / seconds, "rate": rate}
    return {**row, "samples": {"seconds": [seconds]}}
