"""Checks the answers of a server and puts load on it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tightwire.bench.server_process import ServerFailedError

CHECK_PROMPTS = (
    "The capital of France is",
    "Water is made of two elements: hydrogen and",
    "The opposite of hot is",
    "One, two, three, four, five, six,",
)
_CHECK_TOKENS = 16
_CHECK_CHARS = 6  # that an answer must share with the first server's: one or two words
_MAX_DIFFERENT = 1  # answers; another precision may change one of them
_LOAD_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of one round; the round's seed fixes the prompts."""

    concurrency: tuple[int, ...]
    num_requests: tuple[int, ...]  # for each concurrency
    input_len: int
    output_len: int


def greedy_answers(url: str, model: str | None) -> list[str]:
    """The answers to ``CHECK_PROMPTS``, or ServerFailedError. ``model`` None: the first that the server lists."""
    try:
        # llama.cpp closes idle connections, which would look like a missing answer.
        headers = {"Connection": "close"}
        with httpx.Client(timeout=120.0, trust_env=False, base_url=f"{url}/v1", headers=headers) as client:
            name: str = model or client.get("/models").raise_for_status().json()["data"][0]["id"]
            return [_answer(client, name, prompt) for prompt in CHECK_PROMPTS]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise ServerFailedError(f"it does not answer a plain prompt: {type(error).__name__}: {error}") from error


def _answer(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": _CHECK_TOKENS, "temperature": 0, "stream": True}
    text = ""
    with client.stream("POST", "/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data:") and "[DONE]" not in line:
                text += json.loads(line.removeprefix("data:"))["choices"][0].get("text") or ""
    return text


def compare_answers(reference: Sequence[str], answers: Sequence[str]) -> None:
    """Raise ServerFailedError if more answers begin differently than rounding explains."""
    different = [
        f"{prompt!r}: {theirs!r} instead of {ours!r}"
        for prompt, ours, theirs in zip(CHECK_PROMPTS, reference, answers, strict=True)
        if ours[:_CHECK_CHARS] != theirs[:_CHECK_CHARS]
    ]
    if len(different) > _MAX_DIFFERENT:
        raise ServerFailedError("its greedy answers are not those of the first server; " + "; ".join(different))


def bench_serve(
    url: str, load: Load, *, seed: int, output: Path | None = None, label: str = "peer", flags: Sequence[str] = ()
) -> dict[str, Any]:
    """The result of `tightwire bench serve`; ServerFailedError if the load did not finish, or requests failed."""
    command = [sys.executable, "-m", "tightwire", "bench", "serve", "--url", url, "--seed", str(seed), "--warmups", "1"]
    for flag, values in (("--concurrency", load.concurrency), ("--num-requests", load.num_requests)):
        command += [flag, ",".join(map(str, values))]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len), *flags]
    command += ["--output", str(output), "--label", f"{label}-seed{seed}"] if output else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LOAD_S, check=False, text=True)
    except subprocess.TimeoutExpired as error:
        raise ServerFailedError(f"the load did not end within {_LOAD_S:g} s") from error
    if done.returncode != 0 or not done.stdout:
        raise ServerFailedError(
            f"bench serve ended with status {done.returncode}:\n{(done.stderr or done.stdout).strip()[-500:]}"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    for one in result["cells"]:
        if one["failed"] or not one["ttft_s"]:
            raise ServerFailedError(f"{one['name']}: {one['failed']} requests failed: {one['errors']}")
        for kind, asked, share in (("prompt", load.input_len, 0.05), ("generated", load.output_len, 0.02)):
            each = one[f"{kind}_tokens"] / one["succeeded"]
            few = min(12, asked / 4) if kind == "prompt" else 0.5  # a random word may be 6 tokens
            if abs(each - asked) > share * asked + few:
                raise ServerFailedError(f"{one['name']}: {each:.1f} {kind} tokens a request instead of {asked}")
    return result
