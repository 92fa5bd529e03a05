"""``tightwire bench VERB``: picks the bench and imports only that one."""

import importlib
import sys
from collections.abc import Sequence

# verb -> (where its main(argv) lives, what it measures)
VERBS: dict[str, tuple[str, str]] = {
    "comm": (
        "tightwire.bench.comm.bench:main",
        "every AllReduce by message size: time, bandwidth, bytes, error",
    ),
    "compare": (
        "tightwire.bench.compare.bench:main",
        "two results of one bench: ratios with intervals, and an exit code",
    ),
    "kernels": (
        "tightwire.bench.kernels.bench:main",
        "block quantization in GB/s; AllReduce kernels on one GPU",
    ),
    "quality": (
        "tightwire.bench.quality.bench:main",
        "what a quantized AllReduce costs in accuracy: perplexity, KL, greedy texts, noise by layer",
    ),
    "serve": (
        "tightwire.bench.serve.bench:main",
        "load on a running server: TTFT, TPOT, ITL, end to end, tokens/s",
    ),
    "stream": (
        "tightwire.bench.stream.bench:main",
        "steps with streamed weights against what their bytes and their computing take",
    ),
    "train": (
        "tightwire.bench.train.bench:main",
        "training steps between emulated nodes: time, bytes, memory, beside torch's own data parallelism",
    ),
    "ttft": (
        "tightwire.bench.ttft.bench:main",
        "AllReduces against each other on one server, in time to first token",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0 if args else 2
    verb, *rest = args
    if verb not in VERBS:
        sys.stderr.write(f"tightwire bench: unknown bench {verb!r}; choose one of {', '.join(VERBS)}\n")
        return 2
    module, _, name = VERBS[verb][0].partition(":")
    return getattr(importlib.import_module(module), name)(rest)


def _usage() -> str:
    lines = [f"  {verb:8} {help}" for verb, (_, help) in VERBS.items()]
    return "\n".join(["usage: tightwire bench VERB [options]", "", *lines, "", "VERB --help explains its options\n"])
