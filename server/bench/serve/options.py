"""The options of ``tightwire bench serve``: one frozen value, checked where it is born, and its command line."""

import argparse
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightwire.server.bench.label import check_label
from tightwire.server.bench.serve.load import Load


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions:
    loads: tuple[Load, ...]
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    input_len: int = 512
    output_len: int = 64
    prompts: Path | None = None
    reuse_prompts: bool = False
    chat: bool = False
    num_requests: tuple[int, ...] = (32,)
    warmups: int | None = None  # None: as many as the arm's concurrency
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    output: Path | None = None
    label: str = "serve"

    def __post_init__(self) -> None:
        for load in self.loads:
            value = load.concurrency if load.concurrency is not None else load.request_rate
            if value is None or not 0 < value < math.inf:
                raise ValueError(f"--concurrency and --request-rate take numbers above 0, got {value}")
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if len(self.num_requests) not in (1, len(self.loads)) or min(self.num_requests) < 1:
            raise ValueError(
                f"--num-requests takes one number above 0, or one for each of the {len(self.loads)} loads, "
                f"got {','.join(map(str, self.num_requests))}"
            )
        if self.warmups is not None and self.warmups < 0:
            raise ValueError(f"--warmups must be at least 0, got {self.warmups}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")

    def requests_of(self, arm: int) -> int:
        return self.num_requests[arm if len(self.num_requests) > 1 else 0]

    def warmups_of(self, arm: int) -> int:
        """Enough to open every connection and to run the batch at its full size once."""
        if self.warmups is not None:
            return self.warmups
        return min(self.loads[arm].concurrency or 2, self.requests_of(arm))

    def body(self) -> dict[str, Any]:
        """The fields that every request of this run has."""
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {"temperature": self.temperature, **eos, **self.extra_body}


def parse_options(argv: Sequence[str]) -> ServeBenchOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except ValueError as error:
        parser.error(str(error))


def _options(given: argparse.Namespace) -> ServeBenchOptions:
    if given.request_rate:
        loads = tuple(Load(request_rate=rate) for rate in given.request_rate)
    else:
        loads = tuple(Load(concurrency=count) for count in given.concurrency or (1,))
    synthetic = given.prompts is None
    check_label(given.label)
    return ServeBenchOptions(
        loads=loads,
        url=given.url,
        model=given.model,
        api_key=given.api_key,
        input_len=given.input_len,
        output_len=given.output_len,
        prompts=given.prompts,
        reuse_prompts=given.reuse_prompts,
        chat=given.endpoint == "chat",
        num_requests=given.num_requests,
        warmups=given.warmups,
        ignore_eos=synthetic if given.ignore_eos is None else given.ignore_eos,
        temperature=given.temperature,
        extra_body=given.extra_body,
        # A fresh seed by default: the same prompts again would find the server's prefix cache warm.
        seed=secrets.randbelow(1 << 31) if given.seed is None else given.seed,
        timeout_s=given.timeout,
        output=given.output,
        label=given.label,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightwire bench serve",
        description="Put load on a running OpenAI-compatible server, ours or another, and measure it at the client. "
        "The last line of stdout is one JSON object.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    add("--model", metavar="NAME", help="the model to ask for (the first one the server lists)")
    add("--api-key", metavar="KEY", help="sent as a Bearer token")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=_integers, metavar="N,N", help="requests in flight; several are run in turn (1)"
    )
    load.add_argument(
        "--request-rate", type=_numbers, metavar="R,R", help="instead: requests per second, Poisson arrivals"
    )
    add("--num-requests", type=_integers, default=(32,), metavar="N,N", help="measured requests for each load (32)")
    add("--warmups", type=int, metavar="N", help="requests sent first and not counted (as many as the concurrency)")
    add("--input-len", type=int, default=512, metavar="N", help="prompt tokens of synthetic prompts (%(default)s)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens to generate (%(default)s)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="for synthetic prompts")
    add("--prompts", type=Path, metavar="FILE", help="a JSONL file of prompt or messages, and max_tokens if wished")
    add("--reuse-prompts", action="store_true", help="start the file over when it runs out; flatters prefix caches")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate the full length (on for synthetic prompts, off for a file)",
    )
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for every request")
    add("--seed", type=int, metavar="N", help="of prompts and arrivals (a fresh one, printed and recorded)")
    add("--timeout", type=float, default=600.0, metavar="S", help="longest one request may take (%(default)s)")
    add("--output", type=Path, metavar="DIR", help="keep JSON (raw samples included) and CSV there")
    add("--label", default="serve", metavar="NAME", help="beginning of those files' names (%(default)s)")
    return parser


def _integers(text: str) -> tuple[int, ...]:
    numbers = _numbers(text)
    if any(number != int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"expected whole numbers, got {text!r}")
    return tuple(int(number) for number in numbers)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, such as 1,16, got {text!r}")
    return numbers


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text}")
    return value
