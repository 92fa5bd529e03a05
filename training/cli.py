"""The command line of ``tightwire train``. It imports torch only after everything that needs no torch is checked."""

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightwire.progress import importing, spinner
from tightwire.sizes import format_bytes
from tightwire.training.config.read import EXAMPLES, describe_config, read_config
from tightwire.training.config.tree import TrainConfig
from tightwire.training.run.early_checks import check_early, find_topology

if TYPE_CHECKING:
    from tightwire.training.run.rollouts import Engines

_NO_MEMORY = "can't allocate memory", "out of memory", "size calculation overflowed"
_LESS_MEMORY = (
    "`--dry-run` says what takes how much; less memory is needed with smaller values of model, data.sequence_tokens and "
    "batch.micro_sequences, with parallel.checkpoint_blocks=auto, or with parallel.sharding=zero3 on more ranks"
)


def train(argv: Sequence[str], make_engines: "Callable[[], Engines] | None" = None) -> int:
    """Run ``tightwire train``: 0 after the last step or Ctrl-C, 143 after SIGTERM, 1 if it failed, 2 if refused.

    ``make_engines``: makes what answers the prompts of GRPO, of PPO and of a distillation.
    """
    args = _make_parser().parse_intermixed_args(argv)
    if args.keys:
        sys.stdout.write(describe_config())
        return 0
    try:
        if args.config is None:
            raise ValueError("give a CONFIG.yaml or the name of an example; see `tightwire train --help`")
        config = read_config(args.config, args.overrides)
        if args.dry_run:
            from tightwire.training.run.dry_run import dry_run

            sys.stdout.write(dry_run(config, engines=make_engines and make_engines()))
            return 0
        return _run(_prepare(config), make_engines)
    except ValueError as error:
        return _fail(error, 2)
    except (MemoryError, RuntimeError) as error:  # torch says which device; its error for a CPU has no type of its own
        words = str(error).partition("\n")[0] or "not enough memory"
        if not isinstance(error, MemoryError) and not any(text in words for text in _NO_MEMORY):
            raise
        return _fail(f"{words.rpartition('Allocator: ')[2]}. {_LESS_MEMORY}", 1)


def _prepare(config: TrainConfig) -> TrainConfig:
    """Check the run, say what it will read and which outputs it lacks packages for, and switch those off."""
    topology = find_topology(os.environ, config.parallel.nodes)
    data = check_early(config, topology)
    is_missing = config.log.tensorboard and importlib.util.find_spec("tensorboard") is None
    if topology.rank == 0:
        paths = data.documents.files
        num_files = f"{len(paths)} file{'s' if len(paths) > 1 else ''}"
        size = format_bytes(sum(path.stat().st_size for path in paths))
        _say(f"text: {num_files}, {size}")
        if is_missing:
            _say("TensorBoard files will not be written: tensorboard is not installed (pip install tensorboard)")
    log = config.log.model_copy(update={"tensorboard": config.log.tensorboard and not is_missing})
    return config.model_copy(update={"log": log})


def _run(config: TrainConfig, make_engines: "Callable[[], Engines] | None") -> int:
    with spinner("loading torch and transformers, usually 4 to 15 s", os.environ), importing():
        from tightwire.training.run import run
    try:
        ended_by = run.run_training(config, engines=make_engines and make_engines())
        return 128 + signal.SIGTERM if ended_by == signal.SIGTERM else 0
    except run.FAILURES as error:
        return _fail(error, 1)


def _make_parser() -> argparse.ArgumentParser:
    examples = ", ".join(path.stem for path in sorted(EXAMPLES.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="tightwire train",
        usage="tightwire train CONFIG.yaml [key=value ...] [--dry-run]",
        description="Pre-train or fine-tune a dense model or an adapter, alone or under torchrun. `tightwire serve` opens the "
        "exported folder. The same command resumes from the newest checkpoint.",
        epilog=f"examples: {examples}. All but multi-node run as they are, on data that comes with Tightwire.",
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="a YAML file, or an example's name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optimizer.lr=1e-3; values are YAML")
    parser.add_argument("--dry-run", action="store_true", help="print parameters, memory, traffic and step time; exit")
    parser.add_argument("--keys", action="store_true", help="list every key with its default, and exit")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _fail(error: object, code: int) -> int:
    where = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    _say(f"tightwire train{where}: {error}")
    return code
