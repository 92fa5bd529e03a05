"""The verbs ``tune`` and ``explain``: arguments in, exit code out; torch is imported when they are known to be right."""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import replace

from tightwire.server.cli.interrupts import interrupts_end_at_once
from tightwire.server.config.flags import make_parser, parse, refuse_allreduce_extra, refuse_replicas
from tightwire.server.config.serve import ServeConfig

_GROUPS = ("model", "parallel", "engine")
_MAX_SECONDS = 3600.0


def explain(argv: Sequence[str]) -> int:
    """``tightwire explain``: exit code 0, or 2 for options that are refused."""
    parser = make_parser(
        "explain", "Say which AllReduce would sum which message of a model, what it costs, and why.", _GROUPS
    )
    parser.add_argument(
        "--error-budget", dest="comm_error_budget", type=float, metavar="E", help="the same as --comm-error-budget E"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    config, args = parse(parser, argv, _GROUPS)
    refuse_allreduce_extra(parser, config)
    refuse_replicas(parser, config)
    with interrupts_end_at_once():
        return importlib.import_module("tightwire.server.cli.explain").run(_at_least_two_ranks(config), "json" in args)


def tune(argv: Sequence[str]) -> int:
    """``tightwire tune``: exit code 0, 1 when ranks failed or the file cannot be written, 2 for refused options."""
    parser = make_parser(
        "tune", "Measure every AllReduce on this host, in the sizes a model will send; `serve` reads it.", _GROUPS
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, metavar="S", help="about how long it may take in all (default: 60)"
    )
    config, args = parse(parser, argv, _GROUPS)
    refuse_allreduce_extra(parser, config)
    refuse_replicas(parser, config)
    with interrupts_end_at_once():
        module = importlib.import_module("tightwire.bench.tune")
    return module.run(_at_least_two_ranks(config), args.seconds)


def _at_least_two_ranks(config: ServeConfig) -> ServeConfig:
    """One rank sums nothing, so whoever does not say how many is shown two; the setting in the output says so."""
    if config.parallel.tp > 1:
        return config
    return replace(config, parallel=replace(config.parallel, tp=2, tp_split=None))


def _seconds(text: str) -> float:
    """An argparse type: how long to measure."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be 1 to {_MAX_SECONDS:g} seconds, got {text!r}")
    return seconds
