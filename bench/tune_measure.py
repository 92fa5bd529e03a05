"""What ``tightwire tune`` measures: every AllReduce in every size of one setting after the other, and its computing alone.

Ranks are processes of this machine. Answers are checked in every call; what sums wrongly is recorded as wrong, and
``auto`` never takes it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tightwire.bench.comm.measure import (
    Computed,
    ComputingPlan,
    MeasurePlan,
    Timed,
    compute_alone,
    measurable,
    measure,
)
from tightwire.bench.comm.ranks import RankOptions, open_ranks
from tightwire.bench.comm.summary import Cells
from tightwire.bench.report.progress import progress_bar
from tightwire.bench.report.quiet import OthersWatch
from tightwire.comm.group.local_ranks import LocalRanks
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.setting import Setting
from tightwire.comm.policy.tune_file import Computing, Host, Measured, Point

_START_S = 6.0  # for the ranks of one transport to start and join
_OVERRUN = 1.5  # times its share of the time that a transport may take where calls are slower than hoped
_MOST_OTHERS = 0.25  # of the cores; beyond, medians have been seen to be wrong by a factor of ten
_LEAST_SECONDS_PER_SIZE = 0.1
_COMPUTING_CALLS = 15
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


def _measure_setting(
    setting: Setting, request: PolicyRequest, sizes: Sequence[int], per_size_s: float, report: Callable[[float], None]
) -> Measured:
    names = Chooser(request, CostModel(setting)).candidates()
    options = RankOptions(
        ranks=setting.world_size,
        device=setting.device,
        transport=setting.transport,
        nodes=setting.num_nodes,
    )
    order = _ends_first(sizes)
    plan = MeasurePlan(
        algorithms=tuple(names),
        sizes=order,
        dtype=setting.dtype,
        repeats=_MAX_CALLS,
        seconds_per_size=max(_LEAST_SECONDS_PER_SIZE, per_size_s),
        seed=0,
    )
    cells, computed = Cells(setting.world_size), list[Computed]()
    deadline: float | None = None  # from the first answer: ranks may have had to compile before it
    with open_ranks(options) as (ranks, _):
        watch = OthersWatch(ranks.pids)
        for rank, event in ranks.stream(measure, plan):
            cells.add(rank, event)
            now = time.monotonic()
            deadline = deadline or now + _OVERRUN * plan.seconds_per_size * len(order)
            if rank == 0 and isinstance(event, Timed):
                report(order.index(event.size) + event.done / event.rounds)
            if now > deadline and cells.rows():
                break  # sizes in the middle are left out: better than an hour on a crowded machine
        else:
            computed = _measure_computing(ranks, plan) if setting.device == "cpu" else []
        others = watch.share()
    if others > _MOST_OTHERS:
        raise CrowdedError(
            f"others used {others:.0%} of this machine's cores while {setting.transport} was measured, so its times say "
            "little and are not kept; run it again when they are done"
        )
    return judge(setting, cells, computed)


def _measure_computing(ranks: LocalRanks, measured: MeasurePlan) -> list[Computed]:
    """The algorithms' computing without a wire; on CUDA a whole AllReduce is one kernel, so there is none."""
    plan = ComputingPlan(
        algorithms=measurable(measured.algorithms),
        sizes=tuple(sorted(measured.sizes)),
        dtype=measured.dtype,
        repeats=_COMPUTING_CALLS,
    )
    return [answer for _, answer in ranks.stream(compute_alone, plan)]


def _ends_first(sizes: Sequence[int]) -> tuple[int, ...]:
    """The smallest, the largest, the second smallest, ...: what is left out lies between measured sizes."""
    rest, order = list(sizes), []
    while rest:
        order.append(rest.pop(0 if len(order) % 2 == 0 else -1))
    return tuple(order)


def judge(setting: Setting, cells: Cells, computed: Sequence[Computed]) -> Measured:
    """Medians of what was right, and the first fault of each algorithm that was not; of computing, the slowest rank's."""
    slowest: dict[tuple[str, int], float] = {}
    for one in computed:
        key = (one.algorithm, one.size)
        slowest[key] = max(slowest.get(key, 0.0), statistics.median(one.seconds))
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
    computing = tuple(Computing(name, size, seconds * 1e6) for (name, size), seconds in slowest.items())
    return Measured(setting=setting, points=tuple(points), computing=computing, wrong=wrong, date=date)
