"""Runs ``tightwire explain``: reads its flags, then imports what explains."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightwire.comm.policy.schedule import HostRates, parse_rates
from tightwire.option import option, options_of, require
from tightwire.option_flags import add_flags, make_options
from tightwire.server.cli.start import interrupts_end_at_once, refuse
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags
from tightwire.server.config.parallel import MAX_RANKS
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.setting import refuse_wrong_model
from tightwire.sizes import parse_memory

COMM_GROUPS = ("model", "parallel", "engine")
_GROUPS = (*COMM_GROUPS, "adapters")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHosts:
    """Predict every layout on hosts that need not be there."""

    hosts: int | None = option(
        None,
        "first tokens, further tokens and memory by layout on N hosts, joined by --link 1gbit,latency=100us or --network",
        least=2,
    )
    memory: tuple[int, ...] = option(
        (),
        "memory of a host, or of each with commas between: 16GiB,8GiB; default: not limited",
        metavar="BYTES",
        parse=lambda text: tuple(map(parse_memory, text.split(","))),
    )
    host_speed: tuple[HostRates, ...] = option(
        (),
        "bytes that a host reads a second and operations of its products, such as 50GB/s,300GFLOP/s; given once, or once for each "
        "host; default: those of this machine, measured in some seconds",
        metavar="READ,FLOPS",
        parse=lambda text: (parse_rates(text),),
        repeated=True,
    )

    def __post_init__(self) -> None:
        require((self.hosts or 0) <= MAX_RANKS, "hosts", self.hosts, f"at most {MAX_RANKS}")
        for name in ("memory", "host_speed"):
            num, want = len(getattr(self, name)), "one value, or one for each of the hosts of --hosts N"
            require(num in (0, self.hosts) or num == 1 and self.hosts is not None, name, f"{num} values", want)


def explain(argv: Sequence[str]) -> int:
    """``tightwire explain``: exit code 0, or 2 for options that are refused."""
    purpose = "Show which AllReduce sums which message of a model, its cost, and the reason."
    parser = make_parser("explain", purpose, _GROUPS)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    of_network = "between the hosts of the last server whose node 0 was here, as it probed them"
    parser.add_argument("--network", action="store_true", help=of_network)
    add_flags(parser.add_argument_group("hosts", PlannedHosts.__doc__), options_of(PlannedHosts))
    num = re.search(r"(?<!\S)--hosts[= ](\d+)", " ".join(argv))
    # One rank a host, so that the options of ranks are checked for as many.
    ranks = ["--tp", str(max(1, min(int(num[1]), MAX_RANKS)))] if num else []
    config, args = parse(parser, [*argv, *ranks], _GROUPS)
    refuse_serving_flags(parser, config)
    planned = make_options(PlannedHosts, parser, args)
    if planned.hosts and ("link" in args) == ("network" in args):
        parser.error("--hosts needs --link 1gbit,latency=100us, or --network, which a server has probed, and not both")
    for flag in ("--tp", "--layout", "--nodes") if planned.hosts else ():
        if flag in (word.split("=")[0] for word in argv):
            parser.error(f"--hosts compares all layouts, with a rank on each host; leave {flag} out")
    with interrupts_end_at_once():
        try:
            config = summing_config(config, "--hosts" if planned.hosts else "--tp")
            from tightwire.server.cli import explanation, planned_hosts

            shown = {"network": "network" in args, "as_json": "json" in args}
            if planned.hosts:
                planned_hosts.run(config, planned.hosts, planned.memory, planned.host_speed, **shown)
            else:
                explanation.run(config, **shown)
        except ValueError as error:
            return refuse("explain", error)
    return 0


def summing_config(config: ServeConfig, flag: str = "--tp") -> ServeConfig:
    """Use two ranks in place of one, which has no AllReduce; the printed setting shows it. ValueError: as ``refuse_wrong_model``."""
    if config.parallel.tp == 1:
        config = replace(config, parallel=replace(config.parallel, tp=2, tp_split=None))
    refuse_wrong_model(config, flag)
    return config
