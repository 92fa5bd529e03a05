"""The options of ``tightwire bench serve``: one frozen value, checked where it is born, and its command line."""

import argparse
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import add_flags
from tightwire.bench.serve.load import Load
from tightwire.bench.serve.mixed_workload import (
    SHAREGPT_INPUT_LEN,
    SHAREGPT_OUTPUT_LEN,
    MixedWorkload,
    SharedPrefixWorkload,
    ShareGptWorkload,
)
from tightwire.bench.serve.slo import Slo, parse_slo
from tightwire.bench.serve.workload import FileWorkload, SyntheticWorkload

WORKLOADS = ("random", "sharegpt", "shared-prefix")
Workload = SyntheticWorkload | MixedWorkload | FileWorkload


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions:
    loads: tuple[Load, ...]
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    workload: str | Path = "random"  # one of WORKLOADS, or a file of prompts
    input_len: int | None = None  # None: the workload's own
    output_len: int | None = None
    prefix_len: int = 512
    prefix_groups: int = 4
    reuse_prompts: bool = False
    chat: bool = False
    num_requests: tuple[int, ...] = (32,)
    warmups: int | None = None  # None: as many as the arm's concurrency
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    slo: Slo | None = None
    output: Path | None = None
    label: str = "serve"

    def __post_init__(self) -> None:
        for load in self.loads:
            value = load.concurrency if load.concurrency is not None else load.request_rate
            if value is None or not 0 < value < math.inf:
                raise ValueError(f"--concurrency and --request-rate take numbers above 0, got {value}")
            if not 0 < load.burstiness < math.inf:
                raise ValueError(f"--burstiness must be above 0, got {load.burstiness:g}")
        for name in ("input_len", "output_len", "prefix_len", "prefix_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if isinstance(self.workload, Path) and self.input_len is not None:
            raise ValueError("--input-len is for workloads that are made, and the prompts of a file are what they are")
        if isinstance(self.workload, str) and self.reuse_prompts:
            raise ValueError(f"--reuse-prompts is for a file of prompts; the workload {self.workload} never runs out")
        if len(self.num_requests) not in (1, len(self.loads)) or min(self.num_requests) < 1:
            raise ValueError(
                f"--num-requests takes one number above 0, or one for each of the {len(self.loads)} loads, "
                f"got {','.join(map(str, self.num_requests))}"
            )
        if self.warmups is not None and self.warmups < 0:
            raise ValueError(f"--warmups must be at least 0, got {self.warmups}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature must be at least 0, got {self.temperature:g}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")

    def make_workload(self) -> Workload:
        """
        Raises:
            ValueError: the file of prompts cannot be used.
        """
        own = {"sharegpt": (SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN), "shared-prefix": (128, 64)}
        input_len, output_len = own.get(str(self.workload), (512, 64))
        input_len, output_len = self.input_len or input_len, self.output_len or output_len
        if isinstance(self.workload, Path):
            return FileWorkload(self.workload, output_len=output_len, reuse=self.reuse_prompts)
        common: dict[str, Any] = {"output_len": output_len, "seed": self.seed, "chat": self.chat}
        if self.workload == "random":
            return SyntheticWorkload(num_words=input_len, **common)
        if self.workload == "sharegpt":
            return ShareGptWorkload(input_len=input_len, **common)
        return SharedPrefixWorkload(
            input_len=input_len, prefix_len=self.prefix_len, num_groups=self.prefix_groups, **common
        )

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
        burstiness = 1.0 if given.burstiness is None else given.burstiness
        loads = tuple(Load(request_rate=rate, burstiness=burstiness) for rate in given.request_rate)
    else:
        if given.burstiness is not None:
            raise ValueError("--burstiness spreads arrivals, so it needs --request-rate")
        loads = tuple(Load(concurrency=count) for count in given.concurrency or (1,))
    is_file = isinstance(given.workload, Path)
    check_label(given.label)
    return ServeBenchOptions(
        loads=loads,
        url=given.url,
        model=given.model,
        api_key=given.api_key,
        workload=given.workload,
        input_len=given.input_len,
        output_len=given.output_len,
        prefix_len=given.prefix_len,
        prefix_groups=given.prefix_groups,
        reuse_prompts=given.reuse_prompts,
        chat=given.endpoint == "chat",
        num_requests=given.num_requests,
        warmups=given.warmups,
        ignore_eos=not is_file if given.ignore_eos is None else given.ignore_eos,
        temperature=given.temperature,
        extra_body=given.extra_body,
        # A fresh seed by default: the same prompts again would find the server's prefix cache warm.
        seed=secrets.randbelow(1 << 31) if given.seed is None else given.seed,
        timeout_s=given.timeout,
        slo=None if given.slo is None else parse_slo(given.slo),
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
    add("--burstiness", type=float, metavar="B", help="of a rate: below 1 in bursts, above 1 even (1: Poisson)")
    add("--num-requests", type=_integers, default=(32,), metavar="N,N", help="measured requests for each load (32)")
    add("--warmups", type=int, metavar="N", help="requests sent first and not counted (as many as the concurrency)")
    add(
        "--workload",
        type=_workload,
        default="random",
        metavar="W",
        help="random words; sharegpt: lengths as in ShareGPT; shared-prefix: groups that begin alike; or a JSONL file of "
        "prompt or messages, and max_tokens if wished (%(default)s)",
    )
    add(
        "--input-len",
        type=int,
        metavar="N",
        help="prompt tokens: all of random (512), the mean of sharegpt (161), the unshared end of shared-prefix (128)",
    )
    add("--output-len", type=int, metavar="N", help="tokens to generate (64); the mean of sharegpt (338)")
    add("--prefix-len", type=int, default=512, metavar="N", help="tokens of a shared prefix (%(default)s)")
    add("--prefix-groups", type=int, default=4, metavar="N", help="how many such prefixes there are (%(default)s)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="for prompts that are made")
    add("--reuse-prompts", action="store_true", help="start the file over when it runs out; flatters prefix caches")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate the full length (on for prompts that are made, off for a file)",
    )
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for every request")
    add("--seed", type=int, metavar="N", help="of prompts and arrivals (a fresh one, printed and recorded)")
    add("--timeout", type=float, default=600.0, metavar="S", help="longest one request may take (%(default)s)")
    add("--slo", metavar="LIMITS", help="count what meets ttft=500ms,tpot=50ms,e2e=10s (any of them) as goodput")
    add_flags(parser, "serve")
    return parser


def _workload(text: str) -> str | Path:
    if text in WORKLOADS:
        return text
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(WORKLOADS)} or a JSONL file, and there is no file {text}"
        )
    return Path(text)


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
