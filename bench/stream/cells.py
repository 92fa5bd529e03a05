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
    is_prepared: bool = False  # from a folder as ``tightwire prepare`` makes them, made for the run
    is_shared: bool = False  # replicas keep parts of each layer, and make the same steps for sequences of their own
    has_raw: bool = True  # whether its bytes can be had with nothing of the pipeline around them (``raw_source``)


SOURCES = {
    "host": Source(origin="host", codecs=("none", "int8", "int4")),
    "disk": Source(origin="disk", codecs=("none", "int8", "int4"), is_prepared=True),
    "peers": Source(origin="files", codecs=("none", "int8", "int4"), is_shared=True),
    "files": Source(
        origin="disk",
        codecs=("none",),
        why_no_other="the checkpoint's own files are not encoded",
        in_files=True,
        has_raw=False,  # a pass reads here and there, and converts
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

    @property
    def is_shared(self) -> bool:
        return SOURCES[self.source].is_shared

    @property
    def has_raw(self) -> bool:
        """A source that is slowed down has its rate to be held against instead."""
        return SOURCES[self.source].has_raw and not self.rate

    def plan(self, num_layers: int, num_streamed: int, num_replicas: int = 1, io: str = "buffered") -> WeightPlan:
        """``num_replicas``: that share layers, where the source is shared. ``io``: how a prepared folder is read."""
        return WeightPlan(
            source="partition" if self.is_shared else "stream",
            origin=SOURCES[self.source].origin,
            ranks_per_node=num_replicas if self.is_shared else 1,
            io=io,
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
