"""Compares the held-out loss of compressed training with that of dense training, over several seeds.

    python -m tightwire.bench.train.quality [--arms NAME,...] [--seeds 0,1,2] [--jobs 1] [--output DIR] [key=value ...]

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
values is refused. Writes training-quality.json (all curves) and prints a table.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tightwire.bench.options import parse_integers, parse_names
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.table import Column, Table, print_table
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
# Shares of the steps: dense steps first, then equal spans for each sparsity.
_WARM_UP = (0.0, 0.25)
_OTHER_WARM_UP = {"dense-start": (0.1, 0.15)}


def _spread(form: str) -> Any:
    return lambda values: f"{form} ({form} to {form})".format(statistics.fmean(values), min(values), max(values))


COLUMNS = (
    Column("arm", "arm"),
    Column("seeds", "seeds", lambda seeds: str(len(seeds))),
    Column("held-out loss: mean (lowest to highest)", "held_out", _spread("{:.4f}")),
    Column("training loss", "training", ".4f"),
    Column("against dense", "behind", _spread("{:+.2%}")),
    Column("bytes a step", "wire_bytes", ",.0f"),
)


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
        if _values_of(folder) != to_values(config):
            raise ValueError(f"{folder} holds a run with other values, see its config.yaml; choose another --output")
        if read_log(folder / LOG) and read_curve(folder)["finished"]:
            return
    torch.set_num_threads(1)
    options, data = engine_options(config), RunData.find(config)
    check_ranks(config, options, Topology(0, _RANKS, num_nodes=_NODES))
    groups = in_process_train_groups(_RANKS, _NODES, _TIMEOUT_S)
    controls = [Control(group) for group in in_process_groups(_RANKS, _TIMEOUT_S)]

    def train_rank(rank: int) -> None:
        with Ranks(groups=groups[rank], control=controls[rank]) as ranks:
            run = Run(config, options, data, ranks)
            try:
                run.train(lambda: 0)
            finally:
                run.close()

    with ThreadPoolExecutor(_RANKS) as pool:
        list(pool.map(train_rank, range(_RANKS)))


def read_curve(folder: Path) -> dict[str, Any]:
    """The log in a run's folder, which is named ARM-SEED. ``wire_bytes``: mean that rank 0 sent in the last steps."""
    arm, _, seed = folder.name.rpartition("-")
    steps, evaluations = ([line for line in read_log(folder / LOG) if key in line] for key in ("loss", "held_out_loss"))
    return {
        "arm": arm,
        "seed": int(seed),
        "finished": bool(evaluations) and evaluations[-1]["step"] == _values_of(folder)["schedule"]["steps"],
        "steps": [line["step"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "evaluated_steps": [line["step"] for line in evaluations],
        "held_out": [line["held_out_loss"] for line in evaluations],
        "wire_bytes": statistics.fmean(line["wire_bytes"] for line in steps[-_LAST_STEPS:]),
    }


def summarize(curves: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm with finished runs. ``behind``: final held-out loss / that of the dense arm with the same seed - 1."""
    finished = {(curve["arm"], curve["seed"]): curve for curve in curves if curve["finished"]}
    rows = []
    for arm in ARMS:
        own = [finished[key] for key in sorted(finished) if key[0] == arm]
        dense = _DENSE.get(arm, "sgd")
        pairs = [(curve, finished.get((dense, curve["seed"]))) for curve in own if arm != dense]
        behind = [curve["held_out"][-1] / other["held_out"][-1] - 1 for curve, other in pairs if other]
        if own:
            rows.append(
                {
                    "arm": arm,
                    "dense": dense,
                    "seeds": [curve["seed"] for curve in own],
                    "held_out": [curve["held_out"][-1] for curve in own],
                    "training": statistics.fmean(loss for curve in own for loss in curve["losses"][-_LAST_STEPS:]),
                    "behind": behind or None,
                    "wire_bytes": statistics.fmean(curve["wire_bytes"] for curve in own),
                }
            )
    return rows


def report(output: Path) -> Table:
    """Write the JSON file of all runs in ``output``; return the table."""
    curves = [read_curve(log.parent) for log in sorted(output.glob(f"*/{LOG}")) if read_log(log)]
    rows = summarize(curves)
    config = to_values(read_config(_CONFIG))
    result = {"environment": describe_environment(), "config": config, "arms": ARMS, "rows": rows, "runs": curves}
    (output / "training-quality.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return Table(columns=COLUMNS, rows=rows)


def main() -> None:
    given = _parser().parse_args()
    os.chdir(_ROOT)
    given.output.mkdir(parents=True, exist_ok=True)
    configs = [make_config(arm, seed, given.output, given.overrides) for arm in given.arms for seed in given.seeds]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawn, initializer=os.chdir, initargs=(_ROOT,)) as pool:
        for future in as_completed(list(map(partial(pool.submit, train), configs))):
            future.result()
            report(given.output)
    print_table(make_console(), report(given.output))


def _values_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override the arms' values")
    parser.add_argument("--arms", type=_parse_arms, default=tuple(ARMS))
    parser.add_argument("--seeds", type=parse_integers, default=(0, 1, 2))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, about a core each (%(default)s)")
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), default=Path("training-quality").resolve())
    return parser


def _parse_arms(text: str) -> tuple[str, ...]:
    if unknown := set(names := parse_names(text)) - set(ARMS):
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(ARMS)}")
    return names


if __name__ == "__main__":
    main()
