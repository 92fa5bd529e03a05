"""Compares the held-out loss of compressed training with that of dense training, over several seeds.

    python -m tightwire.bench.train.quality [--arms NAME,...] [--seeds 0,1,2] [--jobs 1] [--output DIR] [key=value ...]
    python -m tightwire.bench.train.quality --report-only --output DIR

Each arm is a training run: ``quality.yaml``, the arm's own values, then the given ones, on four ranks of two nodes, which
are threads. The arms of a seed start from the same weights and read the same batches. Arms with AdamW and ZeRO-3:

    zero3           no compression
    zero++          qwZ, hpZ and qgZ: weights in int8, a copy on each node, gradients in int4 on both hops

Arms with momentum SGD on four replicas. DGC and top-k send 0.1 % of the gradient after the sparsity has risen over the
first fifth of the steps. The learning rate is the best one for dense training with seed 7:

    sgd             no compression
    dgc             momentum correction, momentum factor masking, local clipping
    dense-start     the same, with the warm-up of the article's example: dense steps, then 98.4 and 99.6 %
    no-correction   top-k without momentum correction, the article's equation 5
    no-masking      DGC without momentum factor masking
    no-warm-up      0.1 % from the first step

An interrupted run continues from its last checkpoint, and a finished run is kept. A folder that holds a run with other
values is refused. Writes training-quality.json (all curves) and prints a Markdown table.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tightwire.bench.report.environment import describe_environment
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.group.topology import Topology
from tightwire.training.config.read import read_config, to_values
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.run_data import RunData
from tightwire.training.log.run_log import LOG, read_log
from tightwire.training.ranks.control import Control
from tightwire.training.ranks.groups import in_process_train_groups
from tightwire.training.run.run import Run
from tightwire.training.run.setup import Ranks, check_ranks, engine_options

_CONFIG = Path(__file__).resolve().with_suffix(".yaml")
_ROOT = _CONFIG.parents[2]  # the patterns of data.files are relative to it
_RANKS, _NODES = 4, 2
_TIMEOUT_S = 86400.0  # of a collective: the process may be suspended for hours
_LAST_STEPS = 100  # over which training losses and bytes are averaged

_ZERO = (
    "optimizer={name: adamw, lr: 1.0e-3, weight_decay: 0.1, options: {betas: [0.9, 0.95]}}",
    "parallel.sharding=zero3",
)
_ZERO_PP = (
    "parallel.gather_codec=int8",
    "parallel.secondary=true",
    "parallel.reduce_path=hierarchical",
    "parallel.reduce_codec=int4",
    "parallel.reduce_across_codec=int4",
)
_SGD = ("optimizer={name: sgd, lr: 0.05, weight_decay: 0, options: {momentum: 0.9}}", "parallel.sharding=none")
# Eight matrices of norm 0.35 have a joint norm of about 1, the default of optimizer.clip_norm.
_CLIPPED_LOCALLY = ("optimizer.clip_norm=null", "parallel.between.clip_norm=0.35")
_SPARSE = ("parallel.between.sparsity=[0.75, 0.9375, 0.984375, 0.996, 0.999]", *_CLIPPED_LOCALLY)
_DGC = (*_SGD, "optimizer.options={}", "parallel.between.kind=dgc", "parallel.between.momentum=0.9", *_SPARSE)
ARMS = {
    "zero3": _ZERO,
    "zero++": (*_ZERO, *_ZERO_PP),
    "sgd": _SGD,
    "dgc": _DGC,
    "dense-start": (*_DGC, "parallel.between.sparsity=[0.984375, 0.996, 0.999]"),
    "no-correction": (*_SGD, "parallel.between.kind=top-k", *_SPARSE),
    "no-masking": (*_DGC, "parallel.between.mask_momentum=false"),
    "no-warm-up": (*_DGC, "parallel.between.sparsity=[0.999]"),
}
_DENSE = {"zero3": "zero3", "zero++": "zero3"}  # the baseline of each arm; sgd for the others
_ABLATIONS = ("no-correction", "no-masking", "no-warm-up")
# Shares of the steps: dense steps first, then equal spans for each sparsity.
_WARM_UP = (0.0, 0.25)
_OTHER_WARM_UP = {"dense-start": (0.1, 0.15)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The log of one arm with one seed."""

    arm: str
    seed: int
    finished: bool
    steps: list[int]
    losses: list[float]  # of each step's batch
    evaluated_steps: list[int]
    held_out: list[float]
    wire_bytes: float  # mean that rank 0 sent in the last steps


def order_runs(arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """(arm, seed) of each run: all seeds of the main arms first, then those of the ablations."""
    ablations = [arm for arm in arms if arm in _ABLATIONS]
    others = [arm for arm in arms if arm not in _ABLATIONS]
    return [(arm, seed) for group in (others, ablations) for seed in seeds for arm in group]


def make_config(arm: str, seed: int, output: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The run of ``arm`` with ``seed``."""
    values = [*ARMS[arm], f"seed={seed}", f"run={output / f'{arm}-{seed}'}", *overrides]
    if any(value.startswith("parallel.between.sparsity") for value in values):
        steps = read_config(_CONFIG, values).schedule.steps
        dense, rampup = _OTHER_WARM_UP.get(arm, _WARM_UP)
        values.append(f"parallel.between.rampup_begin_step={round(dense * steps)}")
        values.append(f"parallel.between.rampup_step={max(1, round(rampup * steps))}")
    return read_config(_CONFIG, values)


def train(config: TrainConfig) -> None:
    """Train to the end, from the last checkpoint if there is one.

    Raises:
        ValueError: the folder holds a run with other values.
    """
    folder = Path(config.run)
    if (folder / "config.yaml").exists():
        before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        if before != to_values(config):
            raise ValueError(f"{folder} holds a run with other values, see its config.yaml; choose another --output")
        if is_finished(read_log(folder / LOG), config.schedule.steps):
            return
    torch.set_num_threads(1)
    options, data = engine_options(config), RunData.find(config)
    check_ranks(config, options, Topology(0, _RANKS, num_nodes=_NODES))
    groups = in_process_train_groups(_RANKS, _NODES, _TIMEOUT_S)
    controls = [Control(group) for group in in_process_groups(_RANKS, _TIMEOUT_S)]

    def one(rank: int) -> None:
        with Ranks(groups=groups[rank], control=controls[rank]) as ranks:
            run = Run(config, options, data, ranks)
            try:
                run.train(lambda: 0)
            finally:
                run.close()

    with ThreadPoolExecutor(_RANKS) as pool:
        for future in [pool.submit(one, rank) for rank in range(_RANKS)]:
            future.result()


def is_finished(lines: Iterable[dict[str, Any]], steps: int) -> bool:
    return any(line["step"] == steps and "held_out_loss" in line for line in lines)


def read_curve(folder: Path) -> Curve:
    """Read the log in a run's folder, which is named ARM-SEED."""
    arm, _, seed = folder.name.rpartition("-")
    lines = read_log(folder / LOG)
    steps, evaluations = ([line for line in lines if key in line] for key in ("loss", "held_out_loss"))
    wanted = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["schedule"]["steps"]
    return Curve(
        arm=arm,
        seed=int(seed),
        finished=is_finished(lines, wanted),
        steps=[line["step"] for line in steps],
        losses=[line["loss"] for line in steps],
        evaluated_steps=[line["step"] for line in evaluations],
        held_out=[line["held_out_loss"] for line in evaluations],
        wire_bytes=statistics.fmean(line["wire_bytes"] for line in steps[-_LAST_STEPS:]),
    )


def summarize(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """One row per arm with finished runs. ``behind``: final held-out loss / that of the dense arm with the same seed - 1."""
    finished = {(curve.arm, curve.seed): curve for curve in curves if curve.finished}
    rows = []
    for arm in ARMS:
        own = [finished[key] for key in sorted(finished) if key[0] == arm]
        if not own:
            continue
        dense = _DENSE.get(arm, "sgd")
        pairs = [(curve, finished[dense, curve.seed]) for curve in own if (dense, curve.seed) in finished]
        rows.append(
            {
                "arm": arm,
                "dense": dense,
                "seeds": [curve.seed for curve in own],
                "held_out": [curve.held_out[-1] for curve in own],
                "training": [statistics.fmean(curve.losses[-_LAST_STEPS:]) for curve in own],
                "behind": [curve.held_out[-1] / other.held_out[-1] - 1 for curve, other in pairs],
                "wire_bytes": statistics.fmean(curve.wire_bytes for curve in own),
            }
        )
    return rows


def to_table(rows: Iterable[dict[str, Any]]) -> str:
    lines = [
        "| arm | seeds | held-out loss: mean, lowest to highest | training loss | beside dense: mean, lowest to highest | bytes a step |",
        "|---|--:|---|--:|---|--:|",
    ]
    for row in rows:
        behind = "-" if row["arm"] == row["dense"] or not row["behind"] else _spread(row["behind"], "{:+.2%}")
        lines.append(
            f"| {row['arm']} | {len(row['seeds'])} | {_spread(row['held_out'], '{:.4f}')} | "
            f"{statistics.fmean(row['training']):.4f} | {behind} | {row['wire_bytes']:,.0f} |"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(statistics.fmean(values))}, {form.format(min(values))} to {form.format(max(values))}"


def report(output: Path) -> str:
    """Write the JSON file of all runs in ``output``; return the table."""
    curves = [read_curve(log.parent) for log in sorted(output.glob(f"*/{LOG}")) if read_log(log)]
    rows = summarize(curves)
    result = {
        "environment": describe_environment(),
        "config": to_values(read_config(_CONFIG)),
        "arms": ARMS,
        "rows": rows,
        "runs": [asdict(curve) for curve in curves],
    }
    (output / "training-quality.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return to_table(rows)


def main() -> None:
    given = _parser().parse_args()
    os.chdir(_ROOT)
    given.output.mkdir(parents=True, exist_ok=True)
    if not given.report_only:
        runs = order_runs(given.arms, given.seeds)
        configs = [make_config(arm, seed, given.output, given.overrides) for arm, seed in runs]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.jobs, mp_context=spawn, initializer=os.chdir, initargs=(_ROOT,)) as pool:
            for future in as_completed(list(map(partial(pool.submit, train), configs))):
                future.result()
                report(given.output)
    sys.stdout.write(f"{report(given.output)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override the arms' values")
    parser.add_argument("--arms", type=_arms, default=list(ARMS))
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, about a core each (%(default)s)")
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), default=Path("training-quality").resolve())
    parser.add_argument("--report-only", action="store_true", help="only report on the runs in --output")
    return parser


def _arms(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(ARMS):
        raise argparse.ArgumentTypeError(f"no arms {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
