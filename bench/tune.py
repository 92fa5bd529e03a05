"""``tightwire tune``: measures every AllReduce in the sizes a model will send, and keeps the times for this host.

The file is written when a transport has been measured, whole or not at all.
"""

import sys

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tightwire.bench.comm.ranks import TRANSPORTS
from tightwire.bench.tune_measure import TunePlan, measure_all
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.policy.choose import Chooser
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.setting import Setting
from tightwire.comm.policy.tune_file import Measured, check_writable, this_host, tune_path, write_tuned
from tightwire.comm.sizes import format_bytes
from tightwire.comm.transport.segment import why_unusable
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.model.open import open_checkpoint
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.comm_request import policy_request
from tightwire.server.plan.devices import num_cores
from tightwire.server.plan.run_plan import decide_setting


def run(config: ServeConfig, seconds: float) -> int:
    """Exit code 0, 1 when ranks failed or the file cannot be written, 2 for refused options, 130 after Ctrl-C."""
    console = Console(highlight=False)
    try:
        plan = make_plan(config, seconds)
    except ValueError as error:
        sys.stderr.write(f"tightwire tune: {error}\n")
        return 2
    try:
        check_writable(plan.path)
        for measured in measure_all(plan):
            show(console, plan, measured)
            write_tuned(plan.path, plan.host, [measured])
    except (LocalRankError, OSError, ValueError) as error:
        sys.stderr.write(f"tightwire tune: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("tightwire tune: interrupted; what was not measured to its end is not kept\n")
        return 130
    console.print(f"kept in {plan.path}", markup=False, soft_wrap=True)
    return 0


def make_plan(config: ServeConfig, seconds: float) -> TunePlan:
    """Everything ``serve`` with the same options would send, over every transport it may be given.

    Raises:
        ValueError: the model or an option is refused.
    """
    if config.parallel.link is not None:
        raise ValueError(
            "--link: what is measured is this host's own transports and computing; a server with a link predicts from "
            "those and the link's rate"
        )
    model = open_checkpoint(config.model.model, config.model.seed).config
    setting, gpus = decide_setting(config, model)
    host = this_host([gpu.name for gpu in gpus], num_cores())
    return TunePlan(
        settings=tuple(replace(setting, transport=name) for name in _transports(config, setting)),
        request=policy_request(config, model),
        host=host,
        path=tune_path(cache_folder(), host),
        seconds=seconds,
    )


def show(console: Console, plan: TunePlan, measured: Measured) -> None:
    """Medians by size and algorithm, the best lossless one and the best of all marked; then what ``auto`` makes of it."""
    rows = measured.rows()
    table = Table(title=f"{measured.setting}: median us", title_justify="left", title_style="bold")
    table.add_column("algorithm")
    sizes = plan.sizes(measured.setting)
    for size in sizes:
        table.add_column(format_bytes(size), justify="right")
    best = {size: min((us for row in rows.values() for at, us in row if at == size), default=0) for size in sizes}
    for name, row in rows.items():
        by_size = dict(row)
        table.add_row(name, *(_cell(by_size.get(size), best[size]) for size in sizes))
    console.print(table)
    if missing := [format_bytes(size) for size in sizes if not best[size]]:
        console.print(f"no time was left for {', '.join(missing)}; give more --seconds", style="yellow")
    for name, fault in measured.wrong.items():
        console.print(f"{name} summed wrongly and will not be used: {fault}", style="red", markup=False)
    chooser = Chooser(plan.request, CostModel(measured.setting, rows), measured.wrong)
    for choice in chooser.policy().choices("o_proj", 0, "decode"):
        limit = "" if choice.up_to_bytes is None else f" up to {format_bytes(choice.up_to_bytes)}"
        console.print(f"auto, lossless: {choice.algorithms[0]}{limit}: {choice.reason}", markup=False, soft_wrap=True)


def _cell(us: float | None, best_us: float) -> str:
    return "-" if us is None else f"{us:.0f}{' *' if us == best_us else ''}"


def _transports(config: ServeConfig, setting: Setting) -> list[str]:
    """The one that was named, or all that can be had here."""
    if config.parallel.transport != "auto":
        return [setting.transport]
    if setting.device == "cuda":
        return [name for name in ("peer-memory", "process-group") if name in TRANSPORTS]
    return ["process-group"] if why_unusable() else ["shared-memory", "process-group"]
