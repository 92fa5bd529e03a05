"""Compares streamed weights with accelerate's offloading of transformers, in turns, on one model folder.

    python -m tightwire.bench.peers.streaming FOLDER --peer-python ~/.cache/tightwire/peers/transformers/bin/python

`install.sh DIR transformers` makes that environment. A round times each arm once, in random order: decode steps with resident
weights, with layers from host memory (`cpu_offload`), and with layers from files (`disk_offload`). On both sides only the
layers are streamed; embedding, last norm and head stay resident. Prints a Markdown table; the last line of stdout is one
JSON object.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.quiet import OthersWatch
from tightwire.bench.report.statistics import compare
from tightwire.bench.stream.arms import Arm, Load
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.bench.stream.rank import Rank, greedy_tokens, open_single_rank
from tightwire.comm.group.group import Group
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.residency import EVERYTHING_RESIDENT

_PEER = Path(__file__).resolve().with_name("offload_decode.py")
_PAIRS = {"resident": "resident", "host none": "cpu", "disk none": "disk"}  # ours: theirs
_END_S = 20.0
_Samples = dict[tuple[str, str, int], list[float]]  # seconds of each round, by side, arm and batch


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    try:
        result = measure(given)
    except (ModelError, PeerError, ValueError) as error:
        sys.stderr.write(f"streaming: {error}\n")
        return 1
    sys.stdout.write(_table(result) + "\n" + json.dumps(result) + "\n")
    return 0


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds; return times and answers of both sides."""
    torch.set_num_threads(given.threads)
    options = StreamBenchOptions(
        model=given.model, batches=tuple(given.batches), context=given.context, dtype=given.dtype, device=given.device
    )
    with open_single_rank(given.device, 0) as group, Peer(given) as peer:
        rank = Rank(group, options, open_checkpoint(given.model))
        runners = {"resident": rank.build(EVERYTHING_RESIDENT)}
        try:
            for source in ("host", "disk"):
                arm = Arm(source, "none", 0)
                runners[arm.name] = rank.build(arm.plan(rank.num_layers, rank.num_layers))
            tokens = _answers(given, runners, group, peer)
            watch = OthersWatch([peer.pid])
            samples = _rounds(given, rank, runners, peer)
            share = watch.share()
        finally:
            for runner in runners.values():
                runner.close()
    return {
        "environment": describe_environment(),
        "model": given.model,
        "dtype": given.dtype,
        "device": given.device,
        "threads": given.threads,
        "context": given.context,
        "others_share": share,
        "tokens": tokens,
        "cells": [_cell(samples, ours, batch) for ours in _PAIRS for batch in given.batches],
    }


def _answers(
    given: argparse.Namespace, runners: dict[str, ModelRunner], group: Group, peer: "Peer"
) -> dict[str, list[int]]:
    """The tokens that each arm of both sides generates for the same prompt."""
    prompt, count = list(range(3, 3 + given.context - 1)), given.steps
    found = {f"tightwire {name}": greedy_tokens(runner, group, prompt, count) for name, runner in runners.items()}
    for theirs in _PAIRS.values():
        found[f"accelerate {theirs}"] = peer.steps(theirs, 1, count)["tokens"][:count]
    if len({tuple(tokens) for name, tokens in found.items() if name.startswith("tightwire")}) > 1:
        raise ValueError(f"streamed weights generate other tokens than resident ones: {found}")
    return found


def _rounds(given: argparse.Namespace, rank: Rank, runners: dict[str, ModelRunner], peer: "Peer") -> _Samples:
    turns = [
        (side, arm, batch)
        for ours, theirs in _PAIRS.items()
        for batch in given.batches
        for side, arm in (("tightwire", ours), ("accelerate", theirs))
    ]
    order, samples = random.Random(0), defaultdict(list)
    for _ in range(given.rounds):
        order.shuffle(turns)
        for side, arm, batch in turns:
            if side == "accelerate":
                seconds = peer.steps(arm, batch, given.steps)["seconds"]
            else:
                runner, step = runners[arm], rank.step(Load(True, batch))
                seconds, _, _ = rank.passes(lambda runner=runner, step=step: runner.execute(step), given.steps)
            samples[side, arm, batch].append(statistics.median(seconds))
    return samples


def _cell(samples: _Samples, ours: str, batch: int) -> dict[str, Any]:
    mine, its = samples["tightwire", ours, batch], samples["accelerate", _PAIRS[ours], batch]
    return {
        "weights": ours,
        "batch": batch,
        "tightwire_s": statistics.median(mine),
        "accelerate_s": statistics.median(its),
        "accelerate_over_tightwire": asdict(compare(mine, its, paired=True)),
        "samples_s": {"tightwire": mine, "accelerate": its},
    }


class PeerError(Exception):
    """offload_decode.py did not start, or ended."""


class Peer:
    """offload_decode.py in its own environment; it is idle between orders."""

    def __init__(self, given: argparse.Namespace) -> None:
        flags = ["--dtype", given.dtype, "--device", given.device, "--context", str(given.context)]
        command = [given.peer_python, str(_PEER), given.model, *flags, "--threads", str(given.threads)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise PeerError(f"--peer-python {given.peer_python} cannot be run: {error}") from None
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
            raise PeerError(f"{_PEER.name} ended with status {self._process.wait()}; its error is above")
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


def _table(result: dict[str, Any]) -> str:
    lines = ["| weights | batch | tightwire, ms | accelerate, ms | accelerate / tightwire |", "|---|---|---|---|---|"]
    for cell in result["cells"]:
        ratio = cell["accelerate_over_tightwire"]
        words = f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        times = f"{cell['tightwire_s'] * 1e3:,.1f} | {cell['accelerate_s'] * 1e3:,.1f}"
        lines.append(f"| {cell['weights']} | {cell['batch']} | {times} | {words} |")
    return "\n".join([*lines, "", f"other programs used {result['others_share']:.0%} of the cores"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare streamed weights with accelerate's offloading, in turns.")
    add = parser.add_argument
    add("model", help="a folder with config.json and safetensors")
    add(
        "--peer-python", required=True, metavar="PATH", help="Python of an environment with transformers and accelerate"
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(%(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(%(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(%(default)s)")
    add("--context", type=int, default=64, help="tokens per sequence (%(default)s)")
    add("--batches", type=_numbers, default=[1, 8], help="sequences per step (1,8)")
    add("--rounds", type=int, default=5, help="(%(default)s)")
    add(
        "--steps",
        type=int,
        default=3,
        help="timed steps of an arm in a round, of which the median counts (%(default)s)",
    )
    return parser


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
