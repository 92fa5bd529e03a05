"""What ``bench stream`` measures: arms, each a way for weights to come, under loads, each a kind of step."""

from dataclasses import dataclass

from tightwire.model.weights.residency import WeightPlan, spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where layers wait. ``codecs``: those it can give them in; ``why_no_other`` says so to who asks for another."""

    origin: str  # of a ``WeightPlan``
    codecs: tuple[str, ...]
    why_no_other: str = ""
    in_files: bool = False  # only what is in files can come from there


SOURCES = {
    "host": Source(origin="host", codecs=("none", "int8", "int4")),
    "disk": Source(
        origin="disk", codecs=("none",), why_no_other="the checkpoint's own files are not encoded", in_files=True
    ),
}


@dataclass(frozen=True, order=True, slots=True)
class Arm:
    """One way for weights to come. ``rate``: bytes a second that each rank's source is slowed down to; 0: as fast as it is."""

    source: str
    codec: str
    rate: int

    @property
    def name(self) -> str:
        return " ".join([self.source, self.codec, *([f"{self.rate / 1e6:g}MB/s"] if self.rate else [])])

    def plan(self, num_layers: int, num_streamed: int) -> WeightPlan:
        return WeightPlan(
            source="stream",
            origin=SOURCES[self.source].origin,
            codec=self.codec,
            streamed=spread(num_layers, num_streamed),
            bytes_per_s=self.rate or None,
        )


@dataclass(frozen=True, order=True, slots=True)
class Load:
    """One kind of step: ``rows`` sequences that get a token each, or one prompt of ``rows`` tokens."""

    is_decode: bool
    rows: int

    @property
    def name(self) -> str:
        return f"batch {self.rows}" if self.is_decode else f"prompt {self.rows}"
