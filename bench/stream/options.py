"""Defines the options of ``tightwire bench stream``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tightwire.bench.options import OutputOptions, option, parse_integers, parse_names
from tightwire.bench.stream.arms import SOURCES, Arm, Load
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.sizes import parse_bytes
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.residency import LEAST_STREAMED

ROUNDS = 3  # in which all passes of an arm take turns
_MAX_RANKS = 64


def _unique(parse: Callable[[str], tuple[Any, ...]]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(parse(text)))


def _parse_rate(text: str) -> int:
    if text == "none":
        return 0
    if (rate := parse_bytes(text)) < 1:
        raise ValueError("a rate must be above 0; none stands for a source that is not throttled")
    return rate


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamBenchOptions(OutputOptions):
    model: str = option("smollm2-135m", "as for serve", flag="model")
    sources: tuple[str, ...] = option(
        ("host", "disk", "peers"),
        "host: memory; disk: a folder prepared for the run, beside the results; peers: replicas (--dp) that each keep a part of "
        "every layer; files: the checkpoint's own",
        metavar="NAME,NAME",
        parse=_unique(parse_names),
    )
    codecs: tuple[str, ...] = option(
        ("none", "int8", "int4"), "of the streamed layers", metavar="NAME,NAME", parse=_unique(parse_names)
    )
    rates: tuple[int, ...] = option(
        (),
        "bytes/s to which each rank's source is throttled, such as none,100MB,1GB (none)",
        metavar="BYTES,BYTES",
        parse=_unique(lambda text: tuple(map(_parse_rate, text.split(",")))),
        default_factory=lambda: (0,),
    )
    tp: tuple[int, ...] = option((1, 2), "ranks", metavar="N,N", parse=_unique(parse_integers))
    dp: int = option(2, "replicas that share layers as peers", metavar="N")
    batches: tuple[int, ...] = option(
        (1, 8, 32), "sequences in a decode step", metavar="N,N", parse=_unique(parse_integers)
    )
    prompt_rows: int | None = option(None, "also time a step with one prompt of N tokens", metavar="N")
    context: int = option(64, "tokens of each sequence", metavar="N")
    stream_layers: int | None = option(None, "stream N layers, spread evenly (all)", metavar="N")
    dtype: str = option("bfloat16", "of activations", choices=("bfloat16", "float16", "float32"))
    quantization: str = option("none", "of the weights", choices=("auto", "none", "int8", "int4"))
    device: str = option("cpu", "cuda takes one device per rank", choices=("cpu", "cuda"))
    all_reduce: str = option("one-shot", "the AllReduce with --tp above 1", metavar="NAME")
    threads: int = option(1, "computing threads of each rank", metavar="N")
    repeats: int = option(6, "timed passes of each kind", metavar="N")
    seed: int = option(0, "of random weights, tokens and turns", metavar="N")
    # The first run on a machine compiles kernels.
    timeout_s: float = option(120.0, "longest wait for a rank or a layer", metavar="S", flag="--timeout")

    def __post_init__(self) -> None:
        for flag, given, known in (("--sources", self.sources, SOURCES), ("--codecs", self.codecs, WEIGHT_CODECS)):
            if not given or set(given) - set(known):
                raise ValueError(f"{flag} takes {', '.join(known)}, got {','.join(given) or 'nothing'}")
        for flag, values, least in (
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
                f"--tp times --dp must be at most {_MAX_RANKS}, got {max(self.tp)} times {replicas}"
                if replicas > 1
                else f"--tp must be at most {_MAX_RANKS}, got {max(self.tp)}"
            )
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")
        parse_all_reduce(self.all_reduce)
        if self.device == "cuda" and "peers" in self.sources:
            raise ValueError("--sources peers works between ranks on the CPU only; remove it or use --device cpu")
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
        """The combinations of source and codec that are not measured, with the reason."""
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
