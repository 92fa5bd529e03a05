"""``tightwire bench offload``: compares streamed weights with accelerate's offloading of transformers, on one model folder.

`install.sh DIR transformers` makes the environment of the peer. A round times each arm once, in random order: decode steps
with resident weights, with layers from host memory (`cpu_offload`), and with layers from files (`disk_offload`). On both
sides only the layers are streamed; embedding, last norm and head stay resident.
"""

import json
import os
import random
import statistics
import subprocess
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from tightwire.bench.options import REQUIRED, OutputOptions, option, parse_integers
from tightwire.bench.peers.process import PeerError
from tightwire.bench.report.statistics import compare
from tightwire.bench.report.table import Column, Metric
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.stream.options import Arm, StreamBenchOptions
from tightwire.bench.stream.rank import Rank, greedy_tokens, open_single_rank
from tightwire.comm.group.group import Group
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights import EVERYTHING_RESIDENT

_CHILD = Path(__file__).resolve().with_name("transformers_child.py")
_PAIRS = {"resident": "resident", "host none": "cpu", "disk none": "disk"}  # ours: theirs
_END_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadOptions(OutputOptions):
    model: Path = option(REQUIRED, "a folder with config.json and safetensors", flag="model")
    peer_python: Path | None = option(
        None, "Python of an environment with transformers and accelerate (required)", metavar="PATH"
    )
    dtype: str = option("bfloat16", "data type of the weights", choices=("bfloat16", "float16", "float32"))
    device: str = option("cpu", "device of both sides", choices=("cpu", "cuda"))
    threads: int = option(
        None, "threads of each side (default: all cores)", default_factory=lambda: len(os.sched_getaffinity(0)), least=1
    )
    context: int = option(64, "tokens per sequence", metavar="N", least=2)
    batches: tuple[int, ...] = option((1, 8), "sequences per step", metavar="N,N", parse=parse_integers, least=1)
    rounds: int = option(5, "rounds, each with every arm once", metavar="N", least=1)
    steps: int = option(3, "timed steps of an arm in a round; their median counts", metavar="N", least=1)

    def __post_init__(self) -> None:
        if self.peer_python is None:
            raise ValueError("--peer-python is required: DIR/transformers/bin/python of bench/peers/install.sh DIR")


class OffloadBench(Bench[OffloadOptions]):
    """Exit codes: 0, 1 when the peer or the model failed, 2 for bad options, 130 after Ctrl-C."""

    verb = "offload"
    options_type = OffloadOptions
    description = "Compare streamed weights with accelerate's offloading, in rounds of random order."
    metrics = (
        Metric(name="tightwire_s", unit="ms", scale=1e3),
        Metric(name="accelerate_s", unit="ms", scale=1e3, decides=False),
    )
    columns = (
        Column("weights", "weights"),
        Column("batch", "batch", "d"),
        Column("tightwire, ms", "tightwire_s", ",.1f", 1e3),
        Column("accelerate, ms", "accelerate_s", ",.1f", 1e3),
        Column("accelerate / tightwire", "ratio.ratio", ".2f"),
        Column("low", "ratio.low", ".2f"),
        Column("high", "ratio.high", ".2f"),
    )
    failures = ((ModelError, 1), (PeerError, 1), (ValueError, 1))

    def __init__(self, options: OffloadOptions) -> None:
        super().__init__(options)
        self._seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)  # by side, arm and batch

    def measure(self) -> None:
        options = self.options
        torch.set_num_threads(options.threads)
        self.facts = {"model": str(options.model), "dtype": options.dtype, "device": options.device}
        self.facts |= {"threads": options.threads, "context": options.context}
        stream = StreamBenchOptions(
            model=str(options.model),
            batches=options.batches,
            context=options.context,
            dtype=options.dtype,
            device=options.device,
        )
        with open_single_rank(options.device) as group, Peer(options) as peer, ExitStack() as runners_stack:
            rank = Rank(group, stream, open_checkpoint(str(options.model)))
            plans = {"resident": EVERYTHING_RESIDENT}
            for source in ("host", "disk"):
                arm = Arm(source, "none", 0)
                plans[arm.name] = arm.plan(rank.num_layers, rank.num_layers)
            runners = {name: runners_stack.enter_context(closing(rank.build(plan))) for name, plan in plans.items()}
            self.facts["tokens"] = self._check_answers(runners, group, peer)
            with self.watch_others([peer.pid]):
                self._run_rounds(rank, runners, peer)
        table = self.csv({"cells": self.cells()})
        assert table is not None, "this bench has columns"
        self.print_table(table)

    def cells(self) -> list[dict[str, Any]]:
        cells = []
        for ours, theirs in _PAIRS.items():
            for batch in self.options.batches:
                mine, its = self._seconds["tightwire", ours, batch], self._seconds["accelerate", theirs, batch]
                if mine and len(mine) == len(its):
                    cells.append(
                        {
                            "name": f"{ours}, batch {batch}",
                            "weights": ours,
                            "batch": batch,
                            "tightwire_s": statistics.median(mine),
                            "accelerate_s": statistics.median(its),
                            "ratio": asdict(compare(mine, its, paired=True)),
                            "samples": {"tightwire_s": mine, "accelerate_s": its},
                        }
                    )
        return cells

    def _check_answers(self, runners: dict[str, ModelRunner], group: Group, peer: "Peer") -> dict[str, list[int]]:
        """The tokens that each arm of both sides generates for the same prompt."""
        prompt, count = list(range(3, 3 + self.options.context - 1)), self.options.steps
        found = {f"tightwire {name}": greedy_tokens(runner, group, prompt, count) for name, runner in runners.items()}
        if len({tuple(tokens) for tokens in found.values()}) > 1:
            raise BenchFailedError(f"streamed weights generate other tokens than resident ones: {found}")
        return found | {f"accelerate {arm}": peer.steps(arm, 1, count)["tokens"][:count] for arm in _PAIRS.values()}

    def _run_rounds(self, rank: Rank, runners: dict[str, ModelRunner], peer: "Peer") -> None:
        turns = [
            (side, arm, batch)
            for pair in _PAIRS.items()
            for batch in self.options.batches
            for side, arm in zip(("tightwire", "accelerate"), pair, strict=True)
        ]
        order, steps = random.Random(0), self.options.steps
        for _ in range(self.options.rounds):
            order.shuffle(turns)
            for side, arm, batch in turns:
                if side == "accelerate":
                    seconds = peer.steps(arm, batch, steps)["seconds"]
                else:
                    runner, step = runners[arm], rank.step(batch)
                    seconds, _ = rank.passes(lambda runner=runner, step=step: runner.execute(step), steps)
                self._seconds[side, arm, batch].append(statistics.median(seconds))


class Peer:
    """transformers_child.py in its own environment; it is idle between orders."""

    def __init__(self, options: OffloadOptions) -> None:
        command = [str(options.peer_python), str(_CHILD), "offload", str(options.model), "--dtype", options.dtype]
        command += ["--device", options.device, "--threads", str(options.threads)]
        command += ["--prompt-len", str(options.context - 1)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise PeerError(f"--peer-python {options.peer_python} cannot be run: {error}") from None
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def steps(self, arm: str, batch: int, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"arm": arm, "batch": batch, "steps": steps}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise PeerError(f"{_CHILD.name} ended with status {self._process.wait()}; its error is above")
        return json.loads(line)

    def close(self) -> None:
        """Closing its input ends the process, which then removes its files; kill it if that takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
