"""Options of ``tightwire bench stream``, and the arms that they name."""

from dataclasses import dataclass
from typing import ClassVar

from tightwire.bench.options import OutputOptions, known_all_reduce, known_model
from tightwire.model.weights import LEAST_STREAMED, WEIGHT_CODECS, WeightPlan
from tightwire.option import MAX_SECONDS, option
from tightwire.sizes import parse_bytes

ROUNDS = 3  # in which all passes of an arm take turns
_ORIGINS = {"host": "host", "disk": "disk", "files": "disk"}  # of a ``WeightPlan``, by source
_MAX_RANKS = 64


@dataclass(frozen=True, order=True, slots=True)
class Arm:
    """A source and codec of streamed weights. Each rank's source is throttled to ``rate`` bytes/s, or not if that is 0."""

    source: str
    codec: str
    rate: int

    @property
    def name(self) -> str:
        return " ".join([self.source, self.codec, *([f"{self.rate / 1e6:g}MB/s"] if self.rate else [])])

    @property
    def is_prepared(self) -> bool:
        """The source is a folder of ``tightwire prepare``, made for the run."""
        return self.source == "disk"

    def plan(self, num_layers: int, num_streamed: int, io: str = "buffered") -> WeightPlan:
        """``io``: how a prepared folder is read."""
        from tightwire.server.plan.weight_decision import spread  # imports torch, which `--help` does without

        return WeightPlan(
            source="stream",
            origin=_ORIGINS[self.source],
            io=io,
            codec=self.codec,
            streamed=spread(num_layers, num_streamed),
            bytes_per_s=self.rate or None,
        )


def _parse_rate(text: str) -> int:
    if text == "none":
        return 0
    if (rate := parse_bytes(text)) < 1:
        raise ValueError("a rate must be above 0; none: the source is not throttled")
    return rate


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions(OutputOptions):
    description: ClassVar[str] = (
        "Time steps with streamed weights beside fetching alone and computing alone, in turns in the same processes; check that "
        "the answers are those of resident weights."
    )
    model: str = option("smollm2-135m", "as for serve", flag="model", parse=known_model)
    sources: tuple[str, ...] = option(
        ("host", "disk"),
        "where layers come from. host: memory; disk: a folder prepared for the run, next to the results; files: the checkpoint's "
        "own, without a codec",
        unique=True,
    )
    codecs: tuple[str, ...] = option(("none", "int8", "int4"), "codecs of the streamed layers", unique=True)
    rates: tuple[int, ...] = option(
        (),
        "bytes/s to which each rank's source is throttled, such as none,100MB,1GB (default: none)",
        metavar="BYTES,BYTES",
        parse=lambda text: tuple(map(_parse_rate, text.split(","))),
        unique=True,
        default_factory=lambda: (0,),
    )
    tp: tuple[int, ...] = option((1, 2), "numbers of ranks", unique=True, least=1, most=_MAX_RANKS)
    batches: tuple[int, ...] = option((1, 8, 32), "sequences in a decode step", unique=True, least=1)
    context: int = option(64, "tokens of each sequence", least=2)
    stream_layers: int | None = option(None, "stream N layers, spread evenly (default: all)", least=LEAST_STREAMED)
    dtype: str = option("bfloat16", "of activations", choices=("bfloat16", "float16", "float32"))
    quantization: str = option("none", "of the weights", choices=("auto", "none", "int8", "int4"))
    device: str = option("cpu", "cuda takes one device per rank", choices=("cpu", "cuda"))
    allreduce: str = option("one-shot", "the AllReduce with --tp above 1", parse=known_all_reduce)
    threads: int = option(1, "computing threads of each rank", least=1, most=1024)
    repeats: int = option(6, "timed passes of each kind", least=ROUNDS)
    seed: int = option(0, "seed of random weights, tokens and turns")
    # The first run on a machine compiles kernels.
    timeout_s: float = option(120.0, "seconds to wait for a rank or layer", flag="--timeout", above=0, most=MAX_SECONDS)

    def __post_init__(self) -> None:
        for flag, given, known in (("--sources", self.sources, _ORIGINS), ("--codecs", self.codecs, WEIGHT_CODECS)):
            if set(given) - set(known):
                raise ValueError(f"{flag} takes {', '.join(known)}, got {','.join(given)}")
        if not self.arms:
            raise ValueError("--sources files has no codec; add none to --codecs")

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(
            Arm(source, codec, rate)
            for source in self.sources
            for rate in self.rates
            for codec in self.codecs
            if codec == "none" or source != "files"
        )
