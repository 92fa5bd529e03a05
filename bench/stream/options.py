"""The options of ``tightwire bench stream``: one frozen value, checked where it is born, and its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import add_flags
from tightwire.bench.stream.cells import SOURCES, Arm, Load
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.sizes import parse_bytes
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.residency import LEAST_STREAMED

ROUNDS = 3  # in which all of an arm take turns
_DTYPES = ("bfloat16", "float16", "float32")
_QUANTIZATIONS = ("auto", "none", "int8", "int4")
_MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamBenchOptions:
    model: str = "smollm2-135m"
    sources: tuple[str, ...] = ("host", "disk", "peers")
    codecs: tuple[str, ...] = ("none", "int8", "int4")
    rates: tuple[int, ...] = (0,)  # bytes a second; 0: as fast as the source is
    tp: tuple[int, ...] = (1, 2)
    dp: int = 2  # replicas that share layers
    batches: tuple[int, ...] = (1, 8, 32)
    prompt_rows: int | None = None
    context: int = 64
    stream_layers: int | None = None  # None: all
    dtype: str = "bfloat16"
    quantization: str = "none"
    device: str = "cpu"
    all_reduce: str = "one-shot"
    threads: int = 1
    repeats: int = 6
    seed: int = 0
    timeout_s: float = 120.0  # a machine that has compiled no kernel yet does so first
    output: Path | None = None
    label: str = "stream"

    def __post_init__(self) -> None:
        for flag, given, known in (("--sources", self.sources, SOURCES), ("--codecs", self.codecs, WEIGHT_CODECS)):
            if not given or set(given) - set(known):
                raise ValueError(f"{flag} takes {', '.join(known)}, got {','.join(given) or 'nothing'}")
        for flag, values, least in (
            ("--rates", self.rates, 0),
            ("--tp", self.tp, 1),
            ("--dp", (self.dp,), 2),
            ("--batches", self.batches, 1),
            ("--context", (self.context,), 2),
            ("--threads", (self.threads,), 1),
            ("--repeats", (self.repeats,), ROUNDS),
            ("--prompt-rows", (self.prompt_rows or 2,), 2),
            ("--stream-layers", (self.stream_layers or LEAST_STREAMED,), LEAST_STREAMED),
        ):
            if not values or min(values) < least:
                raise ValueError(f"{flag} must be at least {least}, got {','.join(map(str, values)) or 'nothing'}")
        replicas = self.dp if any(arm.is_shared for arm in self.arms) else 1
        if max(self.tp) * replicas > _MAX_RANKS:
            raise ValueError(
                f"--tp goes up to {_MAX_RANKS // replicas}, got {max(self.tp)}"
                if replicas == 1
                else f"--tp times --dp goes up to {_MAX_RANKS}, got {max(self.tp)} times {replicas}"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")
        parse_all_reduce(self.all_reduce)
        check_label(self.label)
        if self.device == "cuda" and "peers" in self.sources:
            raise ValueError("--sources peers is between ranks on the CPU; leave it out beside --device cuda")
        if not self.arms:
            raise ValueError("nothing can be measured: " + "; ".join(self.left_out))

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(
            Arm(source, codec, rate)
            for source in self.sources
            for rate in self.rates
            for codec in self.codecs
            if codec in SOURCES[source].codecs
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Which of the sources are not measured with which codecs, and why."""
        return tuple(
            f"{source} {codec} is left out: {SOURCES[source].why_no_other}"
            for source in self.sources
            for codec in self.codecs
            if codec not in SOURCES[source].codecs
        )

    @property
    def loads(self) -> tuple[Load, ...]:
        prompts = () if self.prompt_rows is None else (Load(False, self.prompt_rows),)
        return (*(Load(True, batch) for batch in self.batches), *prompts)


def parse_options(argv: Sequence[str]) -> StreamBenchOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    try:
        for flag in ("tp", "batches"):
            given[flag] = tuple(dict.fromkeys(_parse_number(flag, text) for text in given[flag].split(",")))
        for flag in ("sources", "codecs"):
            given[flag] = tuple(dict.fromkeys(given[flag].split(",")))
        given["rates"] = tuple(dict.fromkeys(map(_parse_rate, given["rates"].split(","))))
        return StreamBenchOptions(**given)
    except ValueError as error:
        parser.error(str(error))


def _parse_number(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{flag} takes whole numbers with commas between, got {text!r}") from None


def _parse_rate(text: str) -> int:
    if text == "none":
        return 0
    if (rate := parse_bytes(text)) < 1:
        raise ValueError("--rates are above 0; none stands for a source as fast as it is")
    return rate


def _parser() -> argparse.ArgumentParser:
    plain = StreamBenchOptions()
    parser = argparse.ArgumentParser(
        prog="tightwire bench stream",
        description="Time steps with streamed weights against what their bytes and their computing take by themselves, in "
        "the same processes in turns; check that answers are those of resident weights. The last line of stdout is one "
        "JSON object.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        default=plain.model,
        help="as for serve (%(default)s)",
    )
    add(
        "--sources",
        default="host,disk,peers",
        metavar="NAME,NAME",
        help="host: memory; disk: a folder that is prepared for the run, beside the results; peers: replicas (--dp) that keep a "
        "part of each layer; files: the checkpoint's own (%(default)s)",
    )
    add("--codecs", default="none,int8,int4", metavar="NAME,NAME", help="what layers come in (%(default)s)")
    add(
        "--rates",
        default="none",
        metavar="BYTES,BYTES",
        help="bytes/s of layers that each rank's source is slowed down to, such as none,100MB,1GB; none: as fast as it is (%(default)s)",
    )
    add("--tp", default="1,2", metavar="N,N", help="ranks (%(default)s)")
    add("--dp", type=int, default=plain.dp, metavar="N", help="replicas that share layers as peers (%(default)s)")
    add("--batches", default="1,8,32", metavar="N,N", help="sequences in a step that get a token each (%(default)s)")
    add("--prompt-rows", type=int, metavar="N", help="also time a step with one prompt of so many tokens")
    add("--context", type=int, default=plain.context, metavar="N", help="tokens of each sequence (%(default)s)")
    add("--stream-layers", type=int, metavar="N", help="so many layers, spread evenly, are streamed (all)")
    add("--dtype", choices=_DTYPES, default=plain.dtype, help="(%(default)s)")
    add("--quantization", choices=_QUANTIZATIONS, default=plain.quantization, help="of the weights (%(default)s)")
    add("--device", choices=("cpu", "cuda"), default=plain.device, help="cuda takes one device per rank (%(default)s)")
    add("--all-reduce", default=plain.all_reduce, metavar="NAME", help="what sums with --tp above 1 (%(default)s)")
    add("--threads", type=int, default=plain.threads, metavar="N", help="that each rank computes with (%(default)s)")
    add("--repeats", type=int, default=plain.repeats, metavar="N", help="timed passes of each kind (%(default)s)")
    add("--seed", type=int, default=plain.seed, metavar="N", help="of random weights, tokens and turns (%(default)s)")
    add(
        "--timeout",
        type=float,
        default=plain.timeout_s,
        dest="timeout_s",
        metavar="S",
        help="longest that nothing may come or be said (%(default)g)",
    )
    add_flags(parser, "stream")
    return parser
