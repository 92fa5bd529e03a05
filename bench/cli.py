"""Runs ``tightwire bench VERB``: one table names every bench, and only the chosen one is imported."""

import importlib
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

# Verb -> ("module:callable", one line of help). The callable takes the remaining arguments and returns an exit code.
VERBS: dict[str, tuple[str, str]] = {
    "answers": (
        "tightwire.bench.answers.bench:AnswersBench.main",
        "compare servers' answers with the model in float32",
    ),
    "comm": ("tightwire.bench.comm.bench:CommBench.main", "time and check every AllReduce by message size"),
    "compare": (
        "tightwire.bench.compare.bench:CompareBench.main",
        "compare two results of one bench; exit code 1 for a regression",
    ),
    "kernels": (
        "tightwire.bench.kernels.bench:KernelBench.main",
        "time codecs and matrix products on one core, codecs on one GPU",
    ),
    "peers": ("tightwire.bench.peers.run:PeersBench.main", "compare with other servers: vLLM, llama.cpp, transformers"),
    "quality": (
        "tightwire.bench.quality.bench:QualityBench.main",
        "measure the accuracy that a quantized AllReduce costs",
    ),
    "roofline": (
        "tightwire.bench.peers.roofline:RooflineBench.main",
        "profile steps and serving against the device's own rates",
    ),
    "serve": ("tightwire.bench.serve.bench:ServeBench.main", "put load on a running server: TTFT, TPOT, throughput"),
    "stream": ("tightwire.bench.stream.bench:StreamBench.main", "time steps with streamed weights"),
    "train": ("tightwire.bench.train.bench:TrainBench.main", "time training steps between emulated nodes"),
    "ttft": ("tightwire.bench.ttft.bench:TtftBench.main", "compare AllReduces on one server by time to first token"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the bench."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if args else 2
    verb, *rest = args
    if verb not in VERBS:
        sys.stderr.write(f"tightwire bench: unknown bench {verb!r}; choose one of {', '.join(VERBS)}\n")
        return 2
    module, _, name = VERBS[verb][0].partition(":")
    run: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    return run(rest)


def _usage() -> str:
    lines = [f"  {verb:8} {help}" for verb, (_, help) in VERBS.items()]
    return "\n".join(["usage: tightwire bench VERB [options]", "", *lines, "", "VERB --help explains its options\n"])
