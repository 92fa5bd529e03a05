"""`tightwire serve` beside transformers' `generate`: same weights, prompts, lengths and machine, in one session.

    python benchmarks/run_serve_vs_transformers.py [--tp 2,1] [--dtype bfloat16|float32] [--rounds 2] [--output DIR]

The arms take turns (server, server, peer, and again), so that a machine that grows slower hurts all of them. Each
server is started afresh for its turn and nothing else runs meanwhile. Every prompt of a round is new to it; rounds
have prompts of their own. Prints a Markdown table, medians over all rounds; the last line of stdout is one JSON
object; --output keeps every raw sample, the servers' logs and the table.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from running_server import RunningServer, serving

from tightwire.model.checkpoint import open_checkpoint
from tightwire.server.bench.environment import describe_environment
from tightwire.server.bench.quiet import OthersWatch, wait_for_quiet

Turn = Callable[[int, Path], dict[str, Any]]

_HERE = Path(__file__).resolve().parent
_QUIET = 0.1  # share of the cores that others may use
_ATTEMPTS = 3
_TURN_S = 1800.0  # longest one arm may take


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        arms = _arms(given)
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
        for round_ in range(1, given.rounds + 1):
            for name, turn in arms.items():
                _say(f"round {round_}: {name}")
                turns[name].append(_alone(given, turn, round_, folder))
        rows = {name: _row(results) for name, results in turns.items()}
        table = _markdown(given, rows)
        (folder / "table.md").write_text(table, encoding="utf-8")
    sys.stdout.write(table + "\n")
    result = {"schema": "tightwire.bench.serve_vs_transformers/1", "arms": rows, "options": _plain(given)}
    sys.stdout.write(json.dumps({**result, "environment": describe_environment()}) + "\n")
    return 0


def _arms(given: argparse.Namespace) -> dict[str, Turn]:
    """Every server that is measured, then the peer. One rank has nothing to reduce, so no algorithms to compare."""
    arms: dict[str, Turn] = {}
    for tp in given.tp:
        for algorithm in given.allreduce if tp > 1 else given.allreduce[:1]:
            name = f"tightwire TP {tp}, {algorithm}" if tp > 1 else "tightwire TP 1"
            arms[name] = partial(_server_turn, given, ["--tp", str(tp), "--allreduce", algorithm])
    if not given.skip_peer:
        arms["transformers"] = partial(_peer_turn, given)
    return arms


def _alone(given: argparse.Namespace, turn: Turn, round_: int, folder: Path) -> dict[str, Any]:
    """Wait for a quiet machine and take the turn; again, with --wait-for-quiet, if others disturbed it."""
    attempt = 0
    while True:
        attempt += 1
        wait_for_quiet(_QUIET, given.wait_for_quiet)
        watch = OthersWatch()
        result = turn(round_, folder)
        others = watch.share()
        if others < _QUIET:
            return {**result, "others": others}
        repeat = given.wait_for_quiet > 0 and attempt < _ATTEMPTS
        _say(f"others used {others:.0%} of this machine meanwhile: {'once more' if repeat else 'doubtful figures'}")
        if not repeat:
            return {**result, "others": others}


def _server_turn(given: argparse.Namespace, flags: Sequence[str], round_: int, folder: Path) -> dict[str, Any]:
    label = f"{'-'.join(flags).replace('--', '')}-round{round_}"
    with serving(
        given.model, [*flags, "--dtype", given.dtype, *given.serve_flags], log=folder / f"{label}.log"
    ) as server:
        result = _bench(given, server, round_, folder, label)
        result["check"] = _check(server, result["server"]["model"])
        result["ready_s"] = server.ready_s
    return result


def _bench(given: argparse.Namespace, server: RunningServer, round_: int, folder: Path, label: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tightwire", "bench", "serve", "--url", server.url]
    command += [
        "--concurrency",
        f"1,{given.concurrency}",
        "--num-requests",
        f"{given.requests},{2 * given.concurrency}",
    ]
    command += ["--input-len", str(given.input_len), "--output-len", str(given.output_len)]
    command += ["--seed", str(round_), "--output", str(folder), "--label", label]
    result = _last_line(command)
    raw = json.loads(Path(result["files"][0]).read_text(encoding="utf-8"))
    return {**result, "arms": raw["arms"]}


def _peer_turn(given: argparse.Namespace, round_: int, folder: Path) -> dict[str, Any]:
    path = open_checkpoint(given.model).path
    if path is None:
        raise SystemExit(f"{given.model} has no file that transformers could read; use --skip-peer")
    command = [sys.executable, str(_HERE / "peers" / "transformers_generate.py"), str(path)]
    command += ["--dtype", given.dtype, "--threads", str(given.peer_threads), "--seed", str(round_)]
    command += ["--batch-size", f"1,{given.concurrency}", "--num-batches", f"{given.requests},2"]
    command += ["--input-len", str(given.input_len), "--output-len", str(given.output_len)]
    result = _last_line(command)
    (folder / f"transformers-round{round_}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def _check(server: RunningServer, model: str) -> dict[str, str]:
    """The server's greedy answer to the prompt that the peer also answers."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
    return {"text": answer.json()["choices"][0]["text"]}


def _last_line(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TURN_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def _row(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One arm's medians over all its turns, and its answer to the check prompt."""
    served = "arms" in turns[0]
    # A disturbed turn counts only where there is no other.
    quiet = [turn for turn in turns if turn["others"] < _QUIET] or turns
    measured = [_served(turn) if served else _generated(turn) for turn in quiet]
    pooled = {key: [value for each in measured for value in each[key]] for key in measured[0]}
    medians = {key: statistics.median(values) for key, values in pooled.items()}
    spread = {key: [statistics.median(each[key]) for each in measured] for key in measured[0]}
    others = [turn["others"] for turn in turns]
    ready = [turn["ready_s"] for turn in quiet]
    return {
        **medians,
        "ready_s": statistics.median(ready),
        "rounds": spread,
        "answer": turns[0]["check"]["text"],
        "others": others,
    }


def _served(turn: dict[str, Any]) -> dict[str, list[float]]:
    one, many = turn["arms"]
    return {
        "ttft_1_s": [sample["ttft_s"] for sample in one["samples"] if sample["ttft_s"]],
        "tpot_1_s": [sample["tpot_s"] for sample in one["samples"] if sample["tpot_s"]],
        "ttft_n_s": [sample["ttft_s"] for sample in many["samples"] if sample["ttft_s"]],
        "output_n_per_s": [many["output_tokens_per_s"]],
    }


def _generated(turn: dict[str, Any]) -> dict[str, list[float]]:
    one, many = turn["runs"]
    return {
        "ttft_1_s": one["ttft_s"],
        "tpot_1_s": one["tpot_s"],
        "ttft_n_s": many["ttft_s"],
        "output_n_per_s": many["batch_output_tokens_per_s"],
    }


def _markdown(given: argparse.Namespace, rows: dict[str, dict[str, Any]]) -> str:
    n = given.concurrency
    what = f"{given.input_len} prompt tokens, {given.output_len} generated, {given.dtype}"
    heads = [what, "ready, s", "TTFT, ms", "TPOT, ms", "decode tokens/s", f"TTFT at {n}, ms", f"tokens/s at {n}"]
    lines = [f"| {' | '.join(heads)} |", "|---|--:|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        cells = [f"{row['ready_s']:.1f}", f"{row['ttft_1_s'] * 1e3:.0f}", f"{row['tpot_1_s'] * 1e3:.1f}"]
        cells += [f"{1 / row['tpot_1_s']:.1f}", f"{row['ttft_n_s'] * 1e3:.0f}", f"{row['output_n_per_s']:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    peer = rows.get("transformers")
    for name, row in rows.items():
        if peer is not None and row is not peer:
            lines.append(f"| {name}: times as fast | {' | '.join(_ratios(row, peer))} |")
    shares = [f"{share:.0%}" for row in rows.values() for share in row["others"]]
    lines += ["", f"- of the cores, programs that are no part of this used {', '.join(shares)} (arm by arm, its turns)"]
    lines += [f"- a turn with {_QUIET:.0%} or more counts only where its arm has no other"]
    lines += [f"- {name} answers “The capital of France is” with {row['answer']!r}" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def _ratios(row: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    faster = {key: peer[key] / row[key] for key in ("ready_s", "ttft_1_s", "tpot_1_s", "ttft_n_s")}
    output = row["output_n_per_s"] / peer["output_n_per_s"]
    cells = [*(faster[key] for key in ("ready_s", "ttft_1_s", "tpot_1_s", "tpot_1_s", "ttft_n_s")), output]
    return [f"{cell:.2f}" for cell in cells]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _plain(given: argparse.Namespace) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="tightwire serve beside transformers generate, taking turns.")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a name, folder, repo id or .gguf that both can read (%(default)s)")
    add("--tp", type=lambda text: [int(n) for n in text.split(",")], default=[2, 1], metavar="N,N", help="(2,1)")
    add("--allreduce", type=lambda text: text.split(","), default=["auto"], metavar="A,B", help="for TP above 1 (auto)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of both (%(default)s)")
    add("--serve-flags", type=shlex.split, default=[], metavar="FLAGS", help="more for the server, in quotes")
    add("--rounds", type=int, default=2, help="turns of each arm (%(default)s)")
    add("--requests", type=int, default=8, help="measured one after another in each turn (%(default)s)")
    add("--concurrency", type=int, default=16, help="of the second load; twice as many requests (%(default)s)")
    add("--input-len", type=int, default=512, help="prompt tokens (%(default)s)")
    add("--output-len", type=int, default=64, help="tokens to generate (%(default)s)")
    add("--peer-threads", type=int, default=os.cpu_count() or 1, help="of transformers (%(default)s)")
    add("--skip-peer", action="store_true", help="measure the servers alone")
    add(
        "--wait-for-quiet", type=float, default=0.0, metavar="S", help="wait so long for others to finish (%(default)s)"
    )
    add("--output", type=Path, metavar="DIR", help="keep raw samples, logs and the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
