"""The options of ``tightwire bench serve``."""

import json
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.options import OutputOptions, option, parse_integers, parse_numbers
from tightwire.bench.serve.load import Load
from tightwire.bench.serve.summary import Slo, parse_slo
from tightwire.bench.serve.workload import (
    SHAREGPT_INPUT_LEN,
    SHAREGPT_OUTPUT_LEN,
    FileWorkload,
    GeneratedWorkload,
    RandomWorkload,
    SharedPrefixWorkload,
    ShareGptWorkload,
)

_WORKLOADS = ("random", "sharegpt", "shared-prefix")
Workload = GeneratedWorkload | FileWorkload


def _parse_workload(text: str) -> str | Path:
    if text in _WORKLOADS:
        return text
    if not Path(text).exists():
        raise ValueError(f"expected {', '.join(_WORKLOADS)} or a JSONL file, and there is no file {text}")
    return Path(text)


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")  # noqa: TRY004, as all option parsers do
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchOptions(OutputOptions):
    url: str = option("http://127.0.0.1:8000", "the server")
    model: str | None = option(None, "the model to ask for (the first one the server lists)", metavar="NAME")
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY")
    concurrency: tuple[int, ...] = option(
        (), "requests in flight; several are run in turn (1)", metavar="N,N", parse=parse_integers
    )
    request_rate: tuple[float, ...] = option(
        (), "instead: requests per second, Poisson arrivals", metavar="R,R", parse=parse_numbers
    )
    burstiness: float | None = option(None, "of a rate: below 1 in bursts, above 1 more even (1: Poisson)", metavar="B")
    num_requests: tuple[int, ...] = option(
        (32,), "measured requests, of all loads or for each load", metavar="N,N", parse=parse_integers
    )
    warmups: int | None = option(None, "requests sent first and not counted (as many as the concurrency)", metavar="N")
    workload: str | Path = option(
        "random",
        "random words; sharegpt: lengths as in ShareGPT; shared-prefix: groups of prompts with a common beginning; or a JSONL "
        "file whose lines have prompt or messages, and optionally max_tokens",
        metavar="W",
        parse=_parse_workload,
    )
    input_len: int | None = option(
        None,
        "prompt tokens: all of random (512), the mean of sharegpt (161), the unshared end of shared-prefix (128)",
        metavar="N",
    )
    output_len: int | None = option(None, "tokens to generate (64); the mean of sharegpt (338)", metavar="N")
    prefix_len: int = option(512, "tokens of a shared prefix", metavar="N")
    prefix_groups: int = option(4, "number of shared prefixes", metavar="N")
    endpoint: str = option("completions", "for generated prompts", choices=("completions", "chat"))
    reuse_prompts: bool = option(False, "start the file over when it runs out; flatters prefix caches")
    ignore_eos: bool | None = option(None, "generate the full length (on for generated prompts, off for a file)")
    temperature: float = option(0.0, "of sampling", metavar="T")
    extra_body: dict[str, Any] = option(
        None, "more fields for every request", metavar="JSON", parse=_parse_json_object, default_factory=dict
    )
    # The same prompts again would find the server's prefix cache warm.
    seed: int = option(
        None,
        "of prompts and arrivals (a fresh one, printed and recorded)",
        metavar="N",
        default_factory=lambda: secrets.randbelow(1 << 31),
    )
    timeout_s: float = option(600.0, "longest one request may take", metavar="S", flag="--timeout")
    slo: Slo | None = option(
        None,
        "count requests that meet ttft=500ms,tpot=50ms,e2e=10s (any of them) as goodput",
        metavar="LIMITS",
        parse=parse_slo,
    )

    def __post_init__(self) -> None:
        if self.concurrency and self.request_rate:
            raise ValueError("--concurrency is not allowed with --request-rate")
        if self.burstiness is not None and not self.request_rate:
            raise ValueError("--burstiness spreads arrivals, so it needs --request-rate")
        for value in (*self.concurrency, *self.request_rate):
            if not 0 < value < math.inf:
                raise ValueError(f"--concurrency and --request-rate take numbers above 0, got {value}")
        if not 0 < (1.0 if self.burstiness is None else self.burstiness) < math.inf:
            raise ValueError(f"--burstiness must be above 0, got {self.burstiness:g}")
        for name in ("input_len", "output_len", "prefix_len", "prefix_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if isinstance(self.workload, Path) and self.input_len is not None:
            raise ValueError("--input-len is for generated workloads; the prompts of a file have their own lengths")
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

    @property
    def loads(self) -> tuple[Load, ...]:
        if self.request_rate:
            burstiness = 1.0 if self.burstiness is None else self.burstiness
            return tuple(Load(request_rate=rate, burstiness=burstiness) for rate in self.request_rate)
        return tuple(Load(concurrency=count) for count in self.concurrency or (1,))

    def make_workload(self) -> Workload:
        """
        Raises:
            ValueError: the file of prompts cannot be used.
        """
        default_lens = {"sharegpt": (SHAREGPT_INPUT_LEN, SHAREGPT_OUTPUT_LEN), "shared-prefix": (128, 64)}
        input_len, output_len = default_lens.get(str(self.workload), (512, 64))
        input_len, output_len = self.input_len or input_len, self.output_len or output_len
        if isinstance(self.workload, Path):
            return FileWorkload(self.workload, output_len=output_len, reuse=self.reuse_prompts)
        chat = self.endpoint == "chat"
        common: dict[str, Any] = {"input_len": input_len, "output_len": output_len, "seed": self.seed, "chat": chat}
        if self.workload == "shared-prefix":
            return SharedPrefixWorkload(prefix_len=self.prefix_len, num_groups=self.prefix_groups, **common)
        return {"random": RandomWorkload, "sharegpt": ShareGptWorkload}[str(self.workload)](**common)

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
