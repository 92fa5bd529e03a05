"""The options of ``tightwire bench serve``."""

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tightwire.bench.options import OutputOptions
from tightwire.bench.serve.load import Load
from tightwire.bench.serve.workload import Workload
from tightwire.option import MAX_SECONDS, option
from tightwire.remote import parse_key, parse_url

_INPUT_LENS = {"random": 512, "shared-prefix": 128}
_PREFIXES = 512, 4  # their length and number

# Fields that cannot be chosen with --extra-body: the bench sends them, or counts one answer for each request.
_OWN = {
    "model": "is --model",
    "stream": "is always true",
    "n": "would be several answers",
    "best_of": "is one answer",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "is --output-len"),
    **dict.fromkeys(("prompt", "messages"), "is made by --workload and --endpoint"),
}


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text}")  # noqa: TRY004, as all option parsers do
    if own := [name for name in value if name in _OWN and (name, value[name]) not in (("n", 1), ("best_of", 1))]:
        raise ValueError(f"{own[0]!r} {_OWN[own[0]]}, got {text}; give other fields, or leave it out")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions(OutputOptions):
    description: ClassVar[str] = (
        "Put load on a running OpenAI-compatible server, Tightwire or another, and measure at the client."
    )
    url: str = option("http://127.0.0.1:8000", "address of the server", metavar="URL", parse=parse_url)
    model: str | None = option(None, "the model to ask for (default: the first one that the server lists)")
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY", parse=parse_key)
    concurrency: tuple[int, ...] = option((), "requests in flight, one number after the other (default: 1)", least=1)
    request_rate: tuple[float, ...] = option((), "instead of --concurrency: Poisson arrivals per second", above=0)
    num_requests: tuple[int, ...] = option((32,), "measured requests, one number for all loads or for each", least=1)
    warmups: int | None = option(None, "requests sent first and not counted (default: the concurrency)", least=0)
    workload: str = option(
        "random",
        "prompts to send. random: random words; shared-prefix: groups of prompts with a common beginning",
        choices=tuple(_INPUT_LENS),
    )
    input_len: int | None = option(None, "prompt tokens (default: 512); behind a shared prefix (default: 128)", least=1)
    output_len: int = option(64, "tokens to generate", least=1)
    prefix_len: int = option(_PREFIXES[0], "tokens of a shared prefix", least=1)
    prefix_groups: int = option(_PREFIXES[1], "number of shared prefixes", least=1)
    endpoint: str = option("completions", "endpoint for the prompts", choices=("completions", "chat"))
    ignore_eos: bool = option(True, "generate the full length")
    temperature: tuple[float, ...] = option(
        (0.0,), "sampling temperatures, 0 is greedy; with several every load runs with one after the other", least=0
    )
    top_p: float | None = option(None, "top_p of every request (default: the server's)", above=0)
    extra_body: dict[str, Any] = option(
        None,
        'more fields for every request; null leaves one out, as in {"stream_options": null} for a server that refuses it',
        metavar="JSON",
        parse=_parse_json_object,
        default_factory=dict,
    )
    seed: int = option(
        None,
        "seed of arrivals and of prompts, whose first words are new in each run, so that no prefix cache knows them (default: a "
        "fresh one, printed and recorded)",
        default_factory=lambda: secrets.randbelow(1 << 31),
    )
    timeout_s: float = option(600.0, "seconds that a request may take", flag="--timeout", above=0, most=MAX_SECONDS)

    def __post_init__(self) -> None:
        if self.concurrency and self.request_rate:
            raise ValueError("--concurrency is not allowed with --request-rate")
        if self.workload == "random" and (self.prefix_len, self.prefix_groups) != _PREFIXES:
            raise ValueError("--prefix-len and --prefix-groups are for --workload shared-prefix")
        if len(self.num_requests) not in (1, len(self.loads)):
            raise ValueError(
                f"--num-requests takes one number, or one for each of the {len(self.loads)} loads, "
                f"got {','.join(map(str, self.num_requests))}"
            )

    @property
    def loads(self) -> tuple[Load, ...]:
        loads = [Load(request_rate=rate) for rate in self.request_rate]
        loads = loads or [Load(concurrency=count) for count in self.concurrency or (1,)]
        if len(self.temperature) == 1:
            return tuple(loads)
        return tuple(replace(load, temperature=temperature) for temperature in self.temperature for load in loads)

    def make_workload(self) -> Workload:
        return Workload(
            input_len=self.input_len or _INPUT_LENS[self.workload],
            output_len=self.output_len,
            seed=self.seed,
            chat=self.endpoint == "chat",
            prefix_len=self.prefix_len,
            prefix_groups=self.prefix_groups if self.workload == "shared-prefix" else 0,
        )

    def requests_of(self, load: int) -> int:
        return self.num_requests[load if len(self.num_requests) > 1 else 0]

    def warmups_of(self, load: int) -> int:
        """Enough to open every connection and to run the batch at its full size once."""
        if self.warmups is not None:
            return self.warmups
        return min(self.loads[load].concurrency or 2, self.requests_of(load))

    def body(self) -> dict[str, Any]:
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        top_p = {} if self.top_p is None else {"top_p": self.top_p}
        return {"temperature": self.temperature[0], **top_p, **eos, **self.extra_body}
