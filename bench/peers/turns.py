"""What is done to one running server: its answers are checked, then `tightwire bench serve` puts load on it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from arms import Arm

from tightwire.server.cli.remote import RemoteError, SseDecoder, choice_text, first_choice, parse_event

CHECK_PROMPTS = (
    "The capital of France is",
    "Water is made of two elements: hydrogen and",
    "The opposite of hot is",
    "One, two, three, four, five, six,",
)
CHECK_TOKENS = 16
_CHECK_CHARS = 6  # that an answer must share with the first server's: its first word or two
_MOST_UNLIKE = 1  # answers; numbers of another precision may lead one of them elsewhere
_WARMUPS = 1  # in each turn, after the turn that only warms up
_TURN_S = 600.0


class TurnError(Exception):
    """The server did not do what was asked; says what came instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What every server gets in a round: the same prompts, by the round's seed."""

    concurrency: tuple[int, ...]
    num_requests: tuple[int, ...]  # for each concurrency
    input_len: int
    output_len: int


def answers(arm: Arm, url: str) -> list[str]:
    """Its greedy answers to the prompts of the check.

    Raises:
        TurnError: it does not answer.
    """
    try:
        # llama.cpp closes kept connections at times of its own, which here would look like no answer.
        headers = {"Connection": "close"}
        with httpx.Client(timeout=120.0, trust_env=False, base_url=url, headers=headers) as client:
            model = arm.model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            return [_answer(client, model, prompt) for prompt in CHECK_PROMPTS]
    except (httpx.HTTPError, RemoteError, ValueError, KeyError, IndexError) as error:
        raise TurnError(f"it does not answer a plain prompt: {type(error).__name__}: {error}") from error


def _answer(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": CHECK_TOKENS, "temperature": 0, "stream": True}
    decoder = SseDecoder()
    text = ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for data in (data for chunk in response.iter_bytes() for data in decoder.feed(chunk)):
            choice = first_choice(parse_event(data)) if data != "[DONE]" else None
            text += choice_text(choice) if choice else ""
    return text


def compare_answers(reference: Sequence[str], got: Sequence[str]) -> None:
    """A fast wrong answer is worth nothing.

    Raises:
        TurnError: more of them than a difference in rounding explains begin with something else.
    """
    unlike = [
        f"{prompt!r}: {theirs!r} instead of {ours!r}"
        for prompt, ours, theirs in zip(CHECK_PROMPTS, reference, got, strict=True)
        if ours[:_CHECK_CHARS] != theirs[:_CHECK_CHARS]
    ]
    if len(unlike) > _MOST_UNLIKE:
        raise TurnError("its greedy answers are not those of the first server; " + "; ".join(unlike))


def warm_up(arm: Arm, url: str, load: Load) -> None:
    """Every number of requests in flight once, with a few tokens, so that what is made at first use is made.

    Raises:
        TurnError: the load did not end well.
    """
    short = Load(concurrency=load.concurrency, num_requests=load.concurrency, input_len=load.input_len, output_len=4)
    bench(arm, url, short, seed=0, output=None)


def bench(arm: Arm, url: str, load: Load, *, seed: int, output: Path | None) -> dict[str, Any]:
    """One turn; the result of `bench serve`, raw samples included where there is an ``output``.

    Raises:
        TurnError: the load did not end well, or requests failed.
    """
    command = [sys.executable, "-m", "tightwire", "bench", "serve", "--url", url, "--seed", str(seed)]
    command += ["--concurrency", _numbers(load.concurrency), "--num-requests", _numbers(load.num_requests)]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len), "--warmups", str(_WARMUPS)]
    command += ["--model", arm.model] if arm.model else []
    command += [] if arm.ignore_eos else ["--no-ignore-eos"]
    command += ["--output", str(output), "--label", f"{_file_name(arm.name)}-seed{seed}"] if output else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TURN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TurnError(f"the load did not end within {_TURN_S:g} s") from error
    lines = done.stdout.decode().splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr.decode() or done.stdout.decode()).strip()[-500:]
        raise TurnError(f"bench serve ended with status {done.returncode}:\n{said}")
    result = json.loads(lines[-1])
    for load_result in result["cells"]:
        if load_result["failed"] or not load_result["ttft_s"]:
            raise TurnError(f"{load_result['name']}: {load_result['failed']} requests failed: {load_result['errors']}")
    return result


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _file_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in name)
