"""``tightwire tune``: measures every AllReduce in the sizes a model will send, and writes the times to a file for this host.

Ranks are processes of this machine. Every result is checked; an algorithm with a wrong sum is recorded as wrong, and
``auto`` never takes it. The file is written atomically after each transport.
"""

import math
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from tightwire.bench.comm.cells import Cells, size_table
from tightwire.bench.comm.measure import MeasurePlan, measure
from tightwire.bench.options import RankOptions
from tightwire.bench.ranks import open_ranks
from tightwire.bench.report.console import make_console, paused, progress_bar
from tightwire.bench.report.quiet import OthersWatch
from tightwire.bench.report.table import print_table
from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.group.host import num_cores
from tightwire.comm.group.local_ranks import LocalRankError
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.tune_file import (
    PEER_BLOCKS,
    Computing,
    Host,
    Measured,
    Point,
    this_host,
    tune_path,
    write_tuned,
)
from tightwire.comm.transport.segment import why_unusable
from tightwire.model.open import open_checkpoint
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.comm_decision import policy_requests
from tightwire.server.plan.setting import decide_setting
from tightwire.whole_folder import cache_folder

_BLOCKS = (8, 16, 32, 64)  # of a kernel that sums over peer memory: few for short messages, more for long ones
_LOOK_S = 1.5  # for a look at the load before the measurement
_START_S = 6.0  # for the ranks of one transport to start and join
_MAX_OTHERS_SHARE = 0.25  # of the cores; above it, medians were wrong by up to ten times
_MIN_SECONDS_PER_SIZE = 0.1
_MAX_CALLS = 300  # of one algorithm at one size; more do not move the median
_ROW_STEP = 4  # from one message size to the next


class CrowdedError(Exception):
    """Other programs used too much of the machine for the times to be worth keeping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunePlan:
    """The settings to measure, and the file for their times."""

    settings: tuple[Setting, ...]
    request: PolicyRequest
    host: Host
    path: Path
    seconds: float

    def sizes(self, setting: Setting) -> tuple[int, ...]:
        """Bytes of messages of 1, 4, 16, ... rows, of a full step, and of a full decode batch."""
        most = self.request.max_rows
        rows, count = {most, min(most, self.request.max_decode_rows)}, 1
        while count < most:
            rows.add(count)
            count *= _ROW_STEP
        return tuple(sorted(count * self.request.row_elems * setting.elem_bytes for count in rows))


def run(config: ServeConfig, seconds: float, *, allow_busy: bool = False) -> int:
    """Returns 0, 1 when ranks failed or the file cannot be written, 2 for refused options, 130 after Ctrl-C."""
    console, refused = make_console(), 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks remove their files
    try:
        plan = make_plan(config, seconds)
        refused = 1
        if not allow_busy:
            watch = OthersWatch()
            time.sleep(_LOOK_S)
            _check_quiet(watch.share(), "before the measurement")
        write_tuned(plan.path, plan.host, [])  # find out before measuring whether that is possible
        for measured in measure_all(plan, console, allow_busy=allow_busy):
            write_tuned(plan.path, plan.host, [measured])
    except (LocalRankError, CrowdedError, OSError, ValueError) as error:
        sys.stderr.write(f"tightwire tune: {error}\n")
        return refused
    except KeyboardInterrupt:
        sys.stderr.write("tightwire tune: interrupted; unfinished measurements are not kept\n")
        return 130
    console.print(f"written to {plan.path}; `tightwire explain` says what `auto` chooses", markup=False, soft_wrap=True)
    return 0


def make_plan(config: ServeConfig, seconds: float) -> TunePlan:
    """Every message that ``serve`` with the same options would send, over every transport that it could choose."""
    if config.parallel.link is not None:
        raise ValueError(
            "--link: tune measures this host's own transports and computing; a server with a link predicts its times from "
            "those and the link's rate"
        )
    model = open_checkpoint(config.model.model, config.model.seed).config
    decided = decide_setting(config, model)
    setting, host = decided.setting, this_host([gpu.name for gpu in decided.gpus], num_cores())
    return TunePlan(
        settings=tuple(replace(setting, transport=name) for name in _transports(config, setting)),
        request=next(iter(policy_requests(config, model).values())),
        host=host,
        path=tune_path(cache_folder(), host),
        seconds=seconds,
    )


def _transports(config: ServeConfig, setting: Setting) -> list[str]:
    """The requested transport, or all that can work here."""
    if config.parallel.transport != "auto":
        return [setting.transport]
    if setting.device == "cuda":
        return ["peer-memory", "process-group"]
    return ["sockets" if why_unusable() else "shared-memory", "process-group"]


def measure_all(plan: TunePlan, console: Console, *, allow_busy: bool = False) -> Iterator[Measured]:
    """Measure all settings; skip a transport that fails. Raises LocalRankError, CrowdedError on a busy machine."""
    for setting in plan.settings:
        console.print(str(setting), style="bold", markup=False)
        try:
            found = [_measure_setting(plan, setting, console, allow_busy, each) for each in _blocks_of(setting)]
            yield min(found, key=lambda each: (len(each.wrong), sum(math.log(point.us) for point in each.points)))
        except ValueError as error:
            if len(plan.settings) == 1:
                raise
            console.print(f"{setting.transport} is left out: {error}", markup=False, soft_wrap=True)


def _blocks_of(setting: Setting) -> tuple[int, ...]:
    """The blocks of a kernel to measure one after the other."""
    return _BLOCKS if setting.transport == "peer-memory" else (PEER_BLOCKS,)


def _measure_setting(tune: TunePlan, setting: Setting, console: Console, allow_busy: bool, blocks: int) -> Measured:
    options = RankOptions(
        ranks=setting.world_size,
        device=setting.device,
        transport=setting.transport,
        nodes=setting.num_nodes,
        peer_blocks=blocks,
    )
    if setting.transport == "peer-memory":
        console.print(f"{blocks} blocks of a kernel")
    runs = [each for each in tune.settings for _ in _blocks_of(each)]
    num_sizes = sum(len(tune.sizes(each)) for each in runs)
    plan = MeasurePlan(
        algorithms=tuple(Chooser(tune.request, CostModel(setting)).candidates()),
        sizes=tune.sizes(setting),
        dtype=setting.dtype,
        repeats=_MAX_CALLS,
        seconds_per_size=max(_MIN_SECONDS_PER_SIZE, (tune.seconds - _START_S * len(runs)) / num_sizes),
        seed=0,
        computing=setting.device == "cpu",  # on CUDA a whole AllReduce is one kernel: nothing is computed apart from it
    )
    cells = Cells(setting.world_size)
    with open_ranks(options) as (ranks, _), progress_bar() as progress:
        watch = OthersWatch(ranks.pids)
        task = progress.add_task(setting.transport, total=len(plan.sizes))
        for rank, outcomes in ranks.stream(measure, plan):
            if outcomes and (rows := cells.add(rank, outcomes)):
                with paused(progress):
                    print_table(console, size_table(rows))
                progress.advance(task)
        others = watch.share()
    if not allow_busy:
        _check_quiet(others, f"while {setting.transport} was measured")
    return judge(setting, cells, blocks)


def _check_quiet(share: float, when: str) -> None:
    """Raise CrowdedError if other programs use more than ``_MAX_OTHERS_SHARE`` of the cores."""
    if share > _MAX_OTHERS_SHARE:
        raise CrowdedError(
            f"other programs used {share:.0%} of this machine's cores {when}, so times would be wrong and are not kept; run tune "
            "again when the machine is idle, or with --allow-busy"
        )


def judge(setting: Setting, cells: Cells, peer_blocks: int = PEER_BLOCKS) -> Measured:
    """Medians of correct calls, the slowest rank's computing, and the first fault of each wrong algorithm."""
    rows = sorted(cells.rows, key=lambda row: row["size"])
    wrong = {row["algorithm"]: f"{row['size']} B: {row['faults'][0]}" for row in reversed(rows) if row["faults"]}
    return Measured(
        setting=setting,
        points=tuple(
            Point(
                algorithm=row["algorithm"],
                num_bytes=row["size"],
                us=row["seconds"]["p50"] * 1e6,
                num_calls=row["seconds"]["n"],
                wire_bytes=row["wire_bytes"],
                relative_error=row["relative_error"],
            )
            for row in rows
        ),
        computing=tuple(
            Computing(row["algorithm"], row["size"], row["computing_s"] * 1e6) for row in rows if row["computing_s"]
        ),
        wrong=wrong,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        peer_blocks=peer_blocks,
    )
