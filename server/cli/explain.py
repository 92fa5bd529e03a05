"""Runs ``tightwire explain``: reads its flags, then imports what explains."""

from collections.abc import Sequence
from dataclasses import replace

from tightwire.comm.policy.error_budget import parse_error_budget
from tightwire.server.cli.start import interrupts_end_at_once
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags
from tightwire.server.config.serve import ServeConfig

COMM_GROUPS = ("model", "parallel", "engine")
_GROUPS = (*COMM_GROUPS, "adapters")


def explain(argv: Sequence[str]) -> int:
    """``tightwire explain``: exit code 0, or 2 for options that are refused."""
    parser = make_parser(
        "explain", "Show which AllReduce sums which message of a model, its cost, and the reason.", _GROUPS
    )
    parser.add_argument(
        "--error-budget",
        dest="comm_error_budget",
        type=parse_error_budget,
        metavar="E",
        help="the same as --comm-error-budget E",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    parser.add_argument(
        "--network",
        action="store_true",
        help="between the hosts of the last server whose node 0 was here, as it probed them",
    )
    config, args = parse(parser, argv, _GROUPS)
    refuse_serving_flags(parser, config)
    with interrupts_end_at_once():
        from tightwire.server.cli.explanation import run

        return run(at_least_two_ranks(config), "json" in args, "network" in args)


def at_least_two_ranks(config: ServeConfig) -> ServeConfig:
    """Use two ranks in place of one, which has no AllReduce; the printed setting shows it."""
    if config.parallel.tp > 1:
        return config
    return replace(config, parallel=replace(config.parallel, tp=2, tp_split=None))
