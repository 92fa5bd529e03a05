"""The command line of ``tightwire train``. It imports torch only after the configuration is checked."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tightwire.training.config.read import EXAMPLES, ConfigError, describe_config, read_config
from tightwire.training.config.tree import TrainConfig

_SIGTERM_CODE = 128 + signal.SIGTERM


def train(argv: Sequence[str]) -> int:
    """Run ``tightwire train`` and return the exit code.

    Returns:
        0 after the last step or Ctrl-C, 143 after SIGTERM (both signals save a checkpoint), 1 if the run failed, 2 if
        the configuration was refused.
    """
    args = _make_parser().parse_intermixed_args(argv)
    if args.keys:
        sys.stdout.write(describe_config())
        return 0
    if args.config is None:
        sys.stderr.write(
            "tightwire train: give a CONFIG.yaml or the name of an example; see `tightwire train --help`\n"
        )
        return 2
    try:
        config = read_config(args.config, args.overrides)
    except ConfigError as error:
        return _fail(error, 2)
    return _dry_run(config) if args.dry_run else _run(config)


def _run(config: TrainConfig) -> int:
    run = importlib.import_module("tightwire.training.run.run")
    try:
        return _SIGTERM_CODE if run.run_training(config) == signal.SIGTERM else 0
    except run.FAILURES as error:
        return _fail(error, 1)
    except ValueError as error:
        return _fail(error, 2)


def _dry_run(config: TrainConfig) -> int:
    try:
        sys.stdout.write(importlib.import_module("tightwire.training.run.dry_run").dry_run(config))
    except ValueError as error:
        return _fail(error, 2)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    examples = ", ".join(path.stem for path in sorted(EXAMPLES.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="tightwire train",
        usage="tightwire train CONFIG.yaml [key=value ...] [--dry-run]",
        description="Pre-train or fine-tune a Llama, alone or under torchrun. `tightwire serve` opens the exported "
        "folder. The same command resumes from the newest checkpoint.",
        epilog=f"examples: {examples}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.yaml", help="a YAML file, or the name of an example"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optimizer.lr=1e-3; values are YAML")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print parameters, memory, traffic and step time, and exit",
    )
    parser.add_argument("--keys", action="store_true", help="list every key with its default, and exit")
    return parser


def _fail(error: Exception, code: int) -> int:
    rank = os.environ.get("RANK")
    where = "" if rank is None else f" (rank {rank})"
    sys.stderr.write(f"tightwire train{where}: {error}\n")
    return code
