"""Checks the answers of one running server, then puts load on it with `tightwire bench serve`."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tightwire.bench.peers.arms import Arm
from tightwire.server.cli.remote import RemoteError, SseDecoder, choice_text, first_choice, parse_event

CHECK_PROMPTS = (
    "The capital of France is",
    "Water is made of two elements: hydrogen and",
    "The opposite of hot is",
    "One, two, three, four, five, six,",
)
_CHECK_TOKENS = 16
_CHECK_CHARS = 6  # that an answer must share with the first server's: one or two words
_MAX_DIFFERENT = 1  # answers; another precision may change one of them
_TURN_S = 600.0


class LoadError(Exception):
    """The server did not do what was asked; the message says what happened instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load that every server gets in a round; the round's seed fixes the prompts."""

    concurrency: tuple[int, ...]
    num_requests: tuple[int, ...]  # for each concurrency
    input_len: int
    output_len: int


def answers(arm: Arm, url: str) -> list[str]:
    """The server's greedy answers to the check prompts.

    Raises:
        LoadError: it does not answer.
    """
    try:
        # llama.cpp closes idle connections, which would look like a missing answer.
        headers = {"Connection": "close"}
        with httpx.Client(timeout=120.0, trust_env=False, base_url=url, headers=headers) as client:
            model = arm.model or client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            return [_answer(client, model, prompt) for prompt in CHECK_PROMPTS]
    except (httpx.HTTPError, RemoteError, ValueError, KeyError, IndexError) as error:
        raise LoadError(f"it does not answer a plain prompt: {type(error).__name__}: {error}") from error


def _answer(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": _CHECK_TOKENS, "temperature": 0, "stream": True}
    decoder = SseDecoder()
    text = ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for data in (data for chunk in response.iter_bytes() for data in decoder.feed(chunk)):
            choice = first_choice(parse_event(data)) if data != "[DONE]" else None
            text += choice_text(choice) if choice else ""
    return text


def compare_answers(reference: Sequence[str], got: Sequence[str]) -> None:
    """Accept ``got`` if it begins like ``reference``, up to what different rounding explains.

    Raises:
        LoadError: too many answers begin differently.
    """
    different = [
        f"{prompt!r}: {theirs!r} instead of {ours!r}"
        for prompt, ours, theirs in zip(CHECK_PROMPTS, reference, got, strict=True)
        if ours[:_CHECK_CHARS] != theirs[:_CHECK_CHARS]
    ]
    if len(different) > _MAX_DIFFERENT:
        raise LoadError("its greedy answers are not those of the first server; " + "; ".join(different))


def warm_up(arm: Arm, url: str, load: Load) -> None:
    """Run every concurrency once with few tokens, so that first-use work is not measured.

    Raises:
        LoadError: the load failed.
    """
    bench(arm, url, replace(load, num_requests=load.concurrency, output_len=4), seed=0, output=None)


def bench(arm: Arm, url: str, load: Load, *, seed: int, output: Path | None) -> dict[str, Any]:
    """Run one turn and return the result of `bench serve`; ``output``: the folder for raw samples.

    Raises:
        LoadError: the load did not finish, or requests failed.
    """
    command = [sys.executable, "-m", "tightwire", "bench", "serve", "--url", url, "--seed", str(seed)]
    command += ["--concurrency", _numbers(load.concurrency), "--num-requests", _numbers(load.num_requests)]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len), "--warmups", "1"]
    command += ["--model", arm.model] if arm.model else []
    command += [] if arm.ignore_eos else ["--no-ignore-eos"]
    command += ["--output", str(output), "--label", f"{file_name(arm)}-seed{seed}"] if output else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TURN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"the load did not end within {_TURN_S:g} s") from error
    lines = done.stdout.decode().splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr.decode() or done.stdout.decode()).strip()[-500:]
        raise LoadError(f"bench serve ended with status {done.returncode}:\n{said}")
    result = json.loads(lines[-1])
    for one in result["cells"]:
        if one["failed"] or not one["ttft_s"]:
            raise LoadError(f"{one['name']}: {one['failed']} requests failed: {one['errors']}")
    return result


def file_name(arm: Arm) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in arm.name)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
