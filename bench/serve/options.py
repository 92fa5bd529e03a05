"""The options of ``tightwire bench serve``."""

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.options import OutputOptions, option, parse_integers, parse_numbers
from tightwire.bench.serve.load import Load
from tightwire.bench.serve.workload import (
    SHAREGPT_INPUT_LEN,
    SHAREGPT_OUTPUT_LEN,
    FileWorkload,
    GeneratedWorkload,
)

_DEFAULT_LENS = {
    "random": (512, 64),
    "sharegpt": (SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN),
    "shared-prefix": (128, 64),
}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)")
Workload = GeneratedWorkload | FileWorkload


def _parse_workload(text: str) -> str | Path:
    if text in _DEFAULT_LENS:
        return text
    if not Path(text).exists():
        raise ValueError(f"expected {', '.join(_DEFAULT_LENS)} or a JSONL file, and there is no file {text}")
    return Path(text)


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")  # noqa: TRY004, as all option parsers do
    return value


def parse_slo(text: str) -> dict[str, float]:
    """The limits in ``ttft=500ms,tpot=50ms,e2e=10s``, any of the three, in seconds by ``ttft_s``, ``tpot_s``, ``e2e_s``.

    Raises:
        ValueError: another name, a name twice, or no duration.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, duration = (word.strip() for word in part.partition("="))
        found = _DURATION.fullmatch(duration)
        if name not in ("ttft", "tpot", "e2e") or f"{name}_s" in limits or found is None or not float(found[1]):
            raise ValueError(
                f"--slo takes limits for ttft, tpot, e2e, such as ttft=500ms,tpot=50ms,e2e=10s, got {text!r}"
            )
        limits[f"{name}_s"] = float(found[1]) / _PER_SECOND[found[2]]
    return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions(OutputOptions):
    url: str = option("http://127.0.0.1:8000", "address of the server")
    model: str | None = option(
        None, "the model to ask for (default: the first one that the server lists)", metavar="NAME"
    )
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY")
    concurrency: tuple[int, ...] = option(
        (),
        "requests in flight; several numbers run one after the other (default: 1)",
        metavar="N,N",
        parse=parse_integers,
        least=1,
    )
    request_rate: tuple[float, ...] = option(
        (),
        "instead of --concurrency: requests per second, with Poisson arrivals",
        metavar="R,R",
        parse=parse_numbers,
        above=0,
    )
    num_requests: tuple[int, ...] = option(
        (32,),
        "measured requests, one number for all loads or one for each",
        metavar="N,N",
        parse=parse_integers,
        least=1,
    )
    warmups: int | None = option(
        None, "requests sent first and not counted (default: as many as the concurrency)", metavar="N", least=0
    )
    workload: str | Path = option(
        "random",
        "prompts to send. random: random words; sharegpt: lengths as in ShareGPT; shared-prefix: groups of prompts with a common "
        "beginning; or a JSONL file whose lines have prompt or messages, and optionally max_tokens",
        metavar="W",
        parse=_parse_workload,
    )
    input_len: int | None = option(
        None,
        "prompt tokens. random: of all (default: 512); sharegpt: their mean (161); shared-prefix: of the unshared end (128)",
        metavar="N",
        least=1,
    )
    output_len: int | None = option(
        None, "tokens to generate (default: 64); for sharegpt their mean (default: 338)", metavar="N", least=1
    )
    prefix_len: int = option(512, "tokens of a shared prefix", metavar="N", least=1)
    prefix_groups: int = option(4, "number of shared prefixes", metavar="N", least=1)
    endpoint: str = option("completions", "endpoint for generated prompts", choices=("completions", "chat"))
    ignore_eos: bool | None = option(
        None, "generate the full length (default: on for generated prompts, off for a file)"
    )
    temperature: float = option(0.0, "sampling temperature", metavar="T", least=0)
    extra_body: dict[str, Any] = option(
        None, "more fields for every request", metavar="JSON", parse=_parse_json_object, default_factory=dict
    )
    # With the same prompts as in an earlier run, the server's prefix cache would be warm.
    seed: int = option(
        None,
        "seed of prompts and arrivals (default: a fresh one, printed and recorded)",
        metavar="N",
        default_factory=lambda: secrets.randbelow(1 << 31),
    )
    timeout_s: float = option(600.0, "longest time of one request", metavar="S", flag="--timeout", above=0)
    slo: dict[str, float] = option(
        None,
        "count requests that meet ttft=500ms,tpot=50ms,e2e=10s (any of them) as goodput",
        metavar="LIMITS",
        parse=parse_slo,
        default_factory=dict,
    )

    def __post_init__(self) -> None:
        if self.concurrency and self.request_rate:
            raise ValueError("--concurrency is not allowed with --request-rate")
        if isinstance(self.workload, Path) and self.input_len is not None:
            raise ValueError("--input-len is for generated workloads; the prompts of a file have their own lengths")
        if len(self.num_requests) not in (1, len(self.loads)):
            raise ValueError(
                f"--num-requests takes one number, or one for each of the {len(self.loads)} loads, "
                f"got {','.join(map(str, self.num_requests))}"
            )

    @property
    def loads(self) -> tuple[Load, ...]:
        if self.request_rate:
            return tuple(Load(request_rate=rate) for rate in self.request_rate)
        return tuple(Load(concurrency=count) for count in self.concurrency or (1,))

    def make_workload(self) -> Workload:
        """
        Raises:
            ValueError: the file of prompts cannot be used.
        """
        if isinstance(self.workload, Path):
            return FileWorkload(self.workload, output_len=self.output_len or 64)
        input_len, output_len = _DEFAULT_LENS[self.workload]
        return GeneratedWorkload(
            self.workload,
            input_len=self.input_len or input_len,
            output_len=self.output_len or output_len,
            seed=self.seed,
            chat=self.endpoint == "chat",
            prefix_len=self.prefix_len,
            num_groups=self.prefix_groups,
        )

    def requests_of(self, load: int) -> int:
        return self.num_requests[load if len(self.num_requests) > 1 else 0]

    def warmups_of(self, load: int) -> int:
        """Enough to open every connection and to run the batch at its full size once."""
        if self.warmups is not None:
            return self.warmups
        return min(self.loads[load].concurrency or 2, self.requests_of(load))

    @property
    def generates_full_length(self) -> bool:
        return not isinstance(self.workload, Path) if self.ignore_eos is None else self.ignore_eos

    def body(self) -> dict[str, Any]:
        """The fields that every request of this run has."""
        eos = {"ignore_eos": True} if self.generates_full_length else {}
        return {"temperature": self.temperature, **eos, **self.extra_body}
