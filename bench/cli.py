"""Runs ``tightwire bench VERB``: one table names every bench, and only the chosen one is imported."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tightwire.option import option, options_of, suggest
from tightwire.option_flags import add_flags, make_options
from tightwire.server.cli.explain import COMM_GROUPS, summing_config
from tightwire.server.cli.start import refuse
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags

_QUALITY_TOKENS = 4096

# Verb -> ("module:class" in ``bench`` of the options, which imports no torch, "module:class" of the bench, one line of help).
Verbs = dict[str, tuple[str, str, str]]
VERBS: Verbs = {
    "comm": ("comm.options:CommOptions", "comm.bench:CommBench", "time and check every AllReduce by message size"),
    "compare": (
        "compare.options:CompareOptions",
        "compare.bench:CompareBench",
        "compare two results of one bench; exit code 1 for a regression",
    ),
    "kernels": ("kernels.options:KernelOptions", "kernels.bench:KernelBench", "time codecs on one core or one GPU"),
    "quality": (
        "quality.options:QualityOptions",
        "quality.bench:QualityBench",
        "measure the accuracy that a quantized AllReduce costs",
    ),
    "serve": ("serve.options:ServeOptions", "serve.bench:ServeBench", "put load on a server: TTFT, TPOT, throughput"),
    "stream": ("stream.options:StreamOptions", "stream.bench:StreamBench", "time steps with streamed weights"),
    "train": ("train.options:TrainOptions", "train.bench:TrainBench", "time training steps between emulated nodes"),
    "ttft": ("ttft.options:TtftOptions", "ttft.bench:TtftBench", "compare AllReduces by time to first token"),
}
LAB: Verbs = {
    "answers": (
        "lab.answers.options:AnswersOptions",
        "lab.answers.bench:AnswersBench",
        "compare servers' answers with the model in float32",
    ),
    "code": (
        "lab.code.options:CodeOptions",
        "lab.code.bench:CodeBench",
        "let a running server solve HumanEval's problems, by AllReduce",
    ),
    "peers": (
        "lab.peers.options:PeersOptions",
        "lab.peers.run:PeersBench",
        "compare with other servers: vLLM, llama.cpp, transformers",
    ),
    "plan": (
        "lab.plan.bench:PlanOptions",
        "lab.plan.bench:PlanBench",
        "compare what `explain --hosts` predicts with servers on emulated hosts",
    ),
    "roofline": (
        "lab.peers.options:RooflineOptions",
        "lab.peers.roofline:RooflineBench",
        "profile steps and serving against the device's own rates",
    ),
    "structured": (
        "lab.structured.options:StructuredOptions",
        "lab.structured.bench:StructuredBench",
        "check and time constrained answers of a running server",
    ),
}
_LAB_HELP = "the project's own experiments; `tightwire bench lab --help` lists them"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the bench."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["lab"]:
        return _main("bench lab", LAB, args[1:])
    if args and args[0] in LAB:
        sys.stderr.write(f"tightwire bench: {args[0]} is an experiment: `tightwire bench lab {args[0]}`\n")
        return 2
    return _main("bench", VERBS, args)


def _main(command: str, verbs: Verbs, args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(_usage(command, verbs))
        return 0 if args else 2
    verb, *rest = args
    if verb not in verbs:
        sys.stderr.write(f"tightwire {command}: unknown bench {verb!r}{suggest(verb, verbs)}\n")
        return 2
    options, bench, _ = verbs[verb]
    given = load(options).from_argv(rest, verb=f"{command} {verb}".removeprefix("bench "))
    return load(bench)(given).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """The flags of ``tune`` alone."""

    seconds: float = option(60.0, "approximate time of all measurements", metavar="S", least=1, most=3600.0)
    allow_busy: bool = option(False, "measure and keep the times although other programs use the machine")
    quality: bool = option(
        False,
        "instead of times, measure what quantized AllReduces cost this model in KL and perplexity with --tp ranks, for "
        "--comm-error-budget kl=X",
    )
    tokens: int | None = option(None, f"with --quality: tokens to measure on (default: {_QUALITY_TOKENS})", least=1)

    def __post_init__(self) -> None:
        if self.tokens is not None and not self.quality:
            raise ValueError("--tokens is for --quality; --seconds limits the measurement of times")


def tune(argv: Sequence[str]) -> int:
    """``tightwire tune``: exit code 0, 1 if a measurement failed or the file cannot be written, 2 if refused."""
    parser = make_parser(
        "tune",
        "Measure every AllReduce on this host in the sizes that a model will send, or what quantized ones cost the model; "
        "`serve` reads the results.",
        COMM_GROUPS,
    )
    add_flags(parser, options_of(TuneOptions))
    config, args = parse(parser, argv, COMM_GROUPS)
    refuse_serving_flags(parser, config)
    options = make_options(TuneOptions, parser, args)
    try:
        config = summing_config(config)
    except ValueError as error:
        return refuse("tune", error)
    if options.quality:
        from tightwire.bench.quality.accuracy import run as measure_accuracy

        return measure_accuracy(config, options.tokens or _QUALITY_TOKENS)
    from tightwire.bench.tune import run

    return run(config, options.seconds, allow_busy=options.allow_busy)


def load(entry: str) -> Any:
    """The class that an entry of the tables names."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(f"tightwire.bench.{module}"), name)


def _usage(command: str, verbs: Verbs) -> str:
    shown = {name: text for name, (*_, text) in verbs.items()} | ({"lab": _LAB_HELP} if verbs is VERBS else {})
    lines = [f"  {verb:10}  {text}" for verb, text in sorted(shown.items())]
    return "\n".join([f"usage: tightwire {command} VERB [options]", "", *lines, "", "VERB --help explains its flags\n"])
