"""Runs ``tightwire bench VERB``: one table names every bench, and only the chosen one is imported."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tightwire.server.cli.explain import COMM_GROUPS, at_least_two_ranks
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags

_MAX_TUNE_SECONDS = 3600.0
_QUALITY_TOKENS = 4096

# Verb -> ("module below tightwire.bench:NAMEBench", one line of help). The class NAMEOptions in the file `options` of the same
# folder has its options, and imports no torch.
VERBS: dict[str, tuple[str, str]] = {
    "answers": ("lab.answers.bench:AnswersBench", "compare servers' answers with the model in float32"),
    "comm": ("comm.bench:CommBench", "time and check every AllReduce by message size"),
    "compare": ("compare.bench:CompareBench", "compare two results of one bench; exit code 1 for a regression"),
    "kernels": ("kernels.bench:KernelBench", "time codecs on one core or one GPU"),
    "peers": ("lab.peers.run:PeersBench", "compare with other servers: vLLM, llama.cpp, transformers"),
    "quality": ("quality.bench:QualityBench", "measure the accuracy that a quantized AllReduce costs"),
    "roofline": ("lab.peers.roofline:RooflineBench", "profile steps and serving against the device's own rates"),
    "serve": ("serve.bench:ServeBench", "put load on a running server: TTFT, TPOT, throughput"),
    "stream": ("stream.bench:StreamBench", "time steps with streamed weights"),
    "structured": ("lab.structured.bench:StructuredBench", "check and time constrained answers of a running server"),
    "train": ("train.bench:TrainBench", "time training steps between emulated nodes"),
    "ttft": ("ttft.bench:TtftBench", "compare AllReduces on one server by time to first token"),
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
    options_type = _load(f"{module.rpartition('.')[0]}.options", name.removesuffix("Bench") + "Options")
    options = options_type.from_argv(rest, verb=verb)
    return _load(module, name)(options).run()


def tune(argv: Sequence[str]) -> int:
    """``tightwire tune``: exit code 0, 1 if a measurement failed or the file cannot be written, 2 if refused."""
    parser = make_parser(
        "tune",
        "Measure every AllReduce on this host in the sizes that a model will send, or what quantized ones cost the model; "
        "`serve` reads the results.",
        COMM_GROUPS,
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="approximate time of all measurements (default: 60)"
    )
    parser.add_argument(
        "--allow-busy",
        action="store_true",
        default=False,
        help="measure and keep the times although other programs use the machine",
    )
    parser.add_argument(
        "--quality",
        action="store_true",
        default=False,
        help="instead of times, measure what quantized AllReduces cost this model in KL and perplexity with --tp ranks, for "
        "--comm-error-budget kl=X",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"with --quality: tokens of prose to measure on (default: {_QUALITY_TOKENS})",
    )
    config, args = parse(parser, argv, COMM_GROUPS)
    refuse_serving_flags(parser, config)
    if not args.quality and "tokens" in args:
        parser.error("--tokens is for --quality; --seconds limits the measurement of times")
    if args.quality:
        num_tokens = getattr(args, "tokens", _QUALITY_TOKENS)
        if num_tokens < 1:
            parser.error(f"--tokens must be 1 or more, got {num_tokens}")
        return _load("quality.accuracy", "run")(at_least_two_ranks(config), num_tokens)
    if not 1 <= args.seconds <= _MAX_TUNE_SECONDS:
        parser.error(f"--seconds must be 1 to {_MAX_TUNE_SECONDS:g} seconds, got {args.seconds:g}")
    return _load("tune", "run")(at_least_two_ranks(config), args.seconds, allow_busy=args.allow_busy)


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"tightwire.bench.{module}"), name)


def _usage() -> str:
    lines = [f"  {verb:10} {help}" for verb, (_, help) in VERBS.items()]
    return "\n".join(["usage: tightwire bench VERB [options]", "", *lines, "", "VERB --help explains its options\n"])
