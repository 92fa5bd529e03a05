"""Parses the options of ``tightwire explain``, and imports torch only after they are known to be valid."""

import importlib
from collections.abc import Sequence
from dataclasses import replace

from tightwire.server.cli.interrupts import interrupts_end_at_once
from tightwire.server.config.flags import make_parser, parse, refuse_allreduce_extra, refuse_replicas
from tightwire.server.config.serve import ServeConfig

COMM_GROUPS = ("model", "parallel", "engine")


def explain(argv: Sequence[str]) -> int:
    """``tightwire explain``: exit code 0, or 2 for options that are refused."""
    parser = make_parser(
        "explain", "Say which AllReduce would sum which message of a model, what it costs, and why.", COMM_GROUPS
    )
    parser.add_argument(
        "--error-budget", dest="comm_error_budget", type=float, metavar="E", help="the same as --comm-error-budget E"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    config, args = parse(parser, argv, COMM_GROUPS)
    refuse_allreduce_extra(parser, config)
    refuse_replicas(parser, config)
    with interrupts_end_at_once():
        return importlib.import_module("tightwire.server.cli.explain").run(at_least_two_ranks(config), "json" in args)


def at_least_two_ranks(config: ServeConfig) -> ServeConfig:
    """Use two ranks in place of one, which has no AllReduce; the printed setting shows it."""
    if config.parallel.tp > 1:
        return config
    return replace(config, parallel=replace(config.parallel, tp=2, tp_split=None))
