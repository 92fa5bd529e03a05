"""vLLM, llama.cpp and transformers beside `tightwire serve`: the same weights, prompts, lengths and machine, in one session.

    python bench/peers/run.py --peers DIR [--servers tightwire-tp2,vllm,...] [--rounds 5] [--output DIR]

README.md beside this file says how the peers are installed. All servers are started, their answers are checked, then each
round puts the same load on one after the other, in random order, with `tightwire bench serve`; idle ones are watched. A
server that does not start, answers wrongly or fails is reported and left out. Prints a Markdown table; the last line of
stdout is one JSON object; --output keeps raw samples, logs, JSON and an HTML page.

Exit status: 0; 1 when no server could be measured; 2 for bad options; 130 after Ctrl-C (what was measured is kept).
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arms import ARMS, DEFAULT_ARMS, Arm, NotInstalled, Setup, make_arm, running_arm
from page import make_page, markdown
from rounds import Peer, Rounds, plain_load, plain_peers, say
from summary import summarize
from turns import CHECK_PROMPTS, Load

from tightwire.bench.report.environment import describe_environment
from tightwire.bench.report.quiet import wait_for_quiet
from tightwire.bench.report.result_files import ResultFiles
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint

_HERE = Path(__file__).resolve().parent
_QUIET = 0.1  # share of the cores that others may use


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server is to outlive this
    try:
        load = _load(given)
        arms, missing = _arms(given)
        files = ResultFiles(given.output, "peers", ("json", "html")) if given.output else None
    except (ValueError, ModelError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        return _run(given, arms, missing, load, files, given.output or Path(scratch))


def _run(
    given: argparse.Namespace,
    arms: Sequence[Arm],
    missing: Sequence[Peer],
    load: Load,
    files: ResultFiles | None,
    folder: Path,
) -> int:
    began = time.perf_counter()
    rounds = Rounds(arms, load, seed=given.seed, folder=folder, start_s=given.start_timeout)
    done, error = 0, None

    def result() -> dict[str, Any]:
        peers = plain_peers([*rounds.peers, *missing])
        return {
            "schema": "tightwire.bench.peers/1",
            "environment": describe_environment(),
            "load": plain_load(load),
            "rounds": done,
            "rounds_asked": given.rounds,
            "seed": given.seed,
            "check_prompts": list(CHECK_PROMPTS),
            "took_s": time.perf_counter() - began,
            "cells": summarize(peers, given.seed),
            "peers": peers,
            "error": error,
        }

    try:
        with rounds:
            wait_for_quiet(_QUIET, given.wait_for_quiet)
            rounds.start()
            longest_s = 0.0
            while rounds.running and done < given.rounds and time.perf_counter() + longest_s < began + given.time_limit:
                round_began = time.perf_counter()
                rounds.take_turns(done + 1)
                longest_s = max(longest_s, time.perf_counter() - round_began)
                done += 1
                _keep(files, result())
    except KeyboardInterrupt:
        error = "interrupted"
    if not any(peer.turns for peer in rounds.peers):
        error = error or "no server could be measured"
    whole = result()
    _keep(files, whole)
    sys.stdout.write(markdown(whole) + "\n")
    sys.stdout.write(json.dumps(_short(whole, files.paths if files else [])) + "\n")
    return 130 if error == "interrupted" else 1 if error else 0


def _arms(given: argparse.Namespace) -> tuple[list[Arm], list[Peer]]:
    """The servers that can be measured, and those whose programs are not there."""
    arms: list[Arm] = []
    missing: list[Peer] = []
    setup: Setup | None = None
    for word in given.servers:
        running = running_arm(word)
        if running is not None:
            arms.append(running)
            continue
        setup = setup or _setup(given)
        try:
            arms.append(make_arm(word, setup))
        except NotInstalled as error:
            say(f"{word} is left out: {error}")
            missing.append(Peer(arm=Arm(name=word, numbers="-"), fault=str(error)))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"--servers needs every server once, got {', '.join(names)}")
    if setup and any(str(setup.weights) in word for arm in arms for word in arm.command):
        _convert(setup)
    return arms, missing


def _convert(setup: Setup) -> None:
    """Make the peers' forms of the weights where they are not there yet."""
    if all((setup.weights / name).exists() for name in ("hf", "f16.gguf", "bf16.gguf")):
        return
    say(f"converting {setup.gguf.name} for the peers, in {setup.weights}")
    python = setup.peers / "transformers" / "bin" / "python"
    command = [str(python), str(_HERE / "convert_weights.py"), str(setup.gguf), str(setup.weights)]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the peers' weights could not be made ({error}); this needs the transformers peer: "
            f"bench/peers/install.sh {setup.peers} transformers"
        ) from error


def _setup(given: argparse.Namespace) -> Setup:
    path = open_checkpoint(given.model).path
    if path is None or path.suffix != ".gguf":
        raise ValueError(
            f"--model must be or have a .gguf file, which all servers' weights are made from, got {given.model}"
        )
    return Setup(
        model=given.model,
        gguf=path,
        weights=(given.weights or given.peers / "weights" / path.stem).absolute(),
        peers=given.peers,
        num_threads=len(os.sched_getaffinity(0)),
    )


def _load(given: argparse.Namespace) -> Load:
    numbers = given.num_requests
    if len(numbers) != len(given.concurrency) or min([*numbers, *given.concurrency]) < 1:
        raise ValueError(
            f"--num-requests takes one number above 0 for each of the {len(given.concurrency)} of --concurrency, "
            f"got {','.join(map(str, numbers))}"
        )
    if not given.time_limit > 0:
        raise ValueError(f"--time-limit must be above 0 s, got {given.time_limit:g}")
    if given.rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {given.rounds}")
    return Load(
        concurrency=given.concurrency, num_requests=numbers, input_len=given.input_len, output_len=given.output_len
    )


def _keep(files: ResultFiles | None, result: dict[str, Any]) -> None:
    if files is not None:
        files.write_json(result)
        files.write_html(make_page(result))


def _short(result: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Without the turns, which the JSON file has."""
    peers = [{key: value for key, value in peer.items() if key != "turns"} for peer in result["peers"]]
    return {**result, "peers": peers, "files": list(paths)}


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Servers of the same weights side by side, taking turns under one load."
    )
    add = parser.add_argument
    add("--servers", type=lambda text: text.split(","), default=list(DEFAULT_ARMS), metavar="A,B",
        help=f"of {', '.join(ARMS)}; also tightwire-tpN:ALGORITHM, and NAME=URL of a server that runs already; the first is "
        f"what the others are compared with ({','.join(DEFAULT_ARMS)})")  # fmt: skip
    add(
        "--peers",
        type=Path,
        default=cache_folder() / "peers",
        metavar="DIR",
        help="where they are installed (%(default)s)",
    )
    add("--weights", type=Path, metavar="DIR", help="where the peers' forms of the weights are kept (with the peers)")
    add("--model", default="smollm2-135m", help="a name or a .gguf file (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each server; below 5 no verdict is given (%(default)s)")
    add("--concurrency", type=_integers, default=(1, 8, 32), metavar="N,N", help="requests in flight (1,8,32)")
    add(
        "--num-requests", type=_integers, default=(3, 8, 32), metavar="N,N", help="in a turn, for each of them (3,8,32)"
    )
    add("--input-len", type=int, default=128, help="prompt tokens (%(default)s)")
    add("--output-len", type=int, default=32, help="tokens to generate (%(default)s)")
    add("--seed", type=int, default=1, help="of prompts and of the order of turns (%(default)s)")
    add("--time-limit", type=float, default=math.inf, metavar="S", help="no round that would end later (none)")
    add("--start-timeout", type=float, default=900.0, metavar="S", help="longest one may take to start (%(default)s)")
    add(
        "--wait-for-quiet", type=float, default=0.0, metavar="S", help="wait so long for others to finish (%(default)s)"
    )
    add("--output", type=Path, metavar="DIR", help="keep raw samples, logs, JSON and an HTML page there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
