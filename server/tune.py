"""``tightwire tune``: measures every AllReduce in the sizes a model will send, and keeps the times for this host.

Ranks are processes of this machine. Answers are checked in every call; what sums wrongly is recorded as wrong, and
``auto`` never takes it. The file is written when a transport has been measured, whole or not at all.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from tightwire.comm.local_ranks import LocalRankError
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel, Setting
from tightwire.comm.policy.tune_file import Host, Measured, Point, check_writable, this_host, tune_path, write_tuned
from tightwire.comm.transport.segment import why_unusable
from tightwire.model.catalog import cache_folder
from tightwire.model.checkpoint import open_checkpoint
from tightwire.server.bench.comm.measure import MeasurePlan, Timed, measure
from tightwire.server.bench.comm.options import TRANSPORTS, CommBenchOptions
from tightwire.server.bench.comm.ranks import open_ranks
from tightwire.server.bench.comm.summary import Cells
from tightwire.server.bench.progress import progress_bar
from tightwire.server.bench.quiet import OthersWatch
from tightwire.server.comm_request import policy_request
from tightwire.server.config import ServeConfig
from tightwire.server.devices import num_cores
from tightwire.server.run_plan import decide_setting
from tightwire.server.sizes import format_bytes

_START_S = 6.0  # for the ranks of one transport to start and join
_OVERRUN = 1.5  # times its share of the time that a transport may take where calls are slower than hoped
_MOST_OTHERS = 0.25  # of the cores; beyond, medians have been seen to be wrong by a factor of ten
_LEAST_SECONDS_PER_SIZE = 0.1
_MAX_CALLS = 300  # of one algorithm at one size: medians do not move any more
_ROW_STEP = 4  # from one message size to the next


class CrowdedError(ValueError):
    """What was measured is not worth keeping, because the machine was not this program's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunePlan:
    """What will be measured, and where it goes."""

    settings: tuple[Setting, ...]
    request: PolicyRequest
    host: Host
    path: Path
    seconds: float

    def sizes(self, setting: Setting) -> tuple[int, ...]:
        """Bytes of messages of 1, 4, 16, ... rows up to a full step, and of a full batch of generated rows."""
        most = self.request.max_rows
        rows, count = {most, min(most, self.request.max_decode_rows)}, 1
        while count < most:
            rows.add(count)
            count *= _ROW_STEP
        return tuple(sorted(count * self.request.row_elems * setting.elem_bytes for count in rows))


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
            "--link: what is measured is this host's own transports; a server with a link predicts from the link's rate"
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


def measure_all(plan: TunePlan) -> Iterator[Measured]:
    """Measure one setting after the other, leaving out transports that turn out not to be had, unless it is the only one.

    Raises:
        LocalRankError: a rank raised, died or fell silent.
        CrowdedError: others used too much of the machine.
        ValueError: the only transport cannot be had after all.
    """
    progress = progress_bar()
    with progress:
        num_sizes = sum(len(plan.sizes(setting)) for setting in plan.settings)
        task, done = progress.add_task("starting ranks", total=num_sizes), 0
        for setting in plan.settings:
            sizes = plan.sizes(setting)

            def report(index: float, setting: Setting = setting, done: int = done) -> None:
                progress.update(task, description=setting.transport, completed=done + index)

            per_size_s = (plan.seconds - _START_S * len(plan.settings)) / num_sizes
            try:
                yield _measure_setting(setting, plan.request, sizes, per_size_s, report)
            except CrowdedError:
                raise
            except ValueError as error:
                if len(plan.settings) == 1:
                    raise
                progress.console.print(f"{setting.transport} is left out: {error}", markup=False, soft_wrap=True)
            done += len(sizes)


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


def _measure_setting(
    setting: Setting, request: PolicyRequest, sizes: Sequence[int], per_size_s: float, report: Callable[[float], None]
) -> Measured:
    names = Chooser(request, CostModel(setting)).candidates()
    options = CommBenchOptions(
        algorithms=tuple(names),
        sizes=tuple(sizes),
        ranks=setting.world_size,
        dtype=setting.dtype,
        device=setting.device,
        transport=setting.transport,
        nodes=setting.num_nodes,
        repeats=_MAX_CALLS,
        seconds_per_size=max(_LEAST_SECONDS_PER_SIZE, per_size_s),
    )
    order = _ends_first(sizes)
    plan = MeasurePlan(
        algorithms=options.algorithms,
        sizes=order,
        dtype=options.dtype,
        repeats=options.repeats,
        seconds_per_size=options.seconds_per_size,
        seed=options.seed,
    )
    cells = Cells(setting.world_size)
    deadline: float | None = None  # from the first answer: ranks may have had to compile before it
    with open_ranks(options) as (ranks, _):
        watch = OthersWatch(ranks.pids)
        for rank, event in ranks.stream(measure, plan):
            cells.add(rank, event)
            now = time.monotonic()
            deadline = deadline or now + _OVERRUN * options.seconds_per_size * len(order)
            if rank == 0 and isinstance(event, Timed):
                report(order.index(event.size) + event.done / event.rounds)
            if now > deadline and cells.rows():
                break  # sizes in the middle are left out: better than an hour on a crowded machine
        others = watch.share()
    if others > _MOST_OTHERS:
        raise CrowdedError(
            f"others used {others:.0%} of this machine's cores while {setting.transport} was measured, so its times say "
            "little and are not kept; run it again when they are done"
        )
    return judge(setting, cells)


def _ends_first(sizes: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the largest, the second smallest, ...: what is left out lies between measured sizes."""
    rest, order = list(sizes), []
    while rest:
        order.append(rest.pop(0 if len(order) % 2 == 0 else -1))
    return tuple(order)


def judge(setting: Setting, cells: Cells) -> Measured:
    """Medians of what was right, and the first fault of each algorithm that was not."""
    rows = cells.rows()
    wrong: dict[str, str] = {}
    for row in rows:
        if row["faults"]:
            wrong.setdefault(row["algorithm"], f"{row['size']} B: {row['faults'][0]}")
    points = (
        Point(
            algorithm=row["algorithm"],
            num_bytes=row["size"],
            us=row["seconds"]["p50"] * 1e6,
            num_calls=row["seconds"]["n"],
            wire_bytes=row["wire_bytes"],
            relative_error=row["relative_error"],
        )
        for row in rows
    )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Measured(setting=setting, points=tuple(points), wrong=wrong, date=date)


def _transports(config: ServeConfig, setting: Setting) -> list[str]:
    """The one that was named, or all that can be had here."""
    if config.parallel.transport != "auto":
        return [setting.transport]
    if setting.device == "cuda":
        return [name for name in ("peer-memory", "process-group") if name in TRANSPORTS]
    return ["process-group"] if why_unusable() else ["shared-memory", "process-group"]
