"""Flags of streamed and partitioned weights."""

from dataclasses import dataclass, fields

from tightwire.model.weights import WEIGHT_CODECS
from tightwire.server.config.option import option, require


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOptions:
    """Placement of weights: resident, streamed or shared by replicas."""

    weights: str = option(
        "auto",
        "resident: on the device; stream: as many layers as fit stay there, the others come one after the other through two "
        "buffers, the next while one is computed; partition: the replicas (--dp) of a node keep a part of every layer each and "
        "gather it before use; auto: resident where they fit, else partition where replicas share a node's memory, else stream",
        ("auto", "resident", "stream", "partition"),
    )
    stream_from: str = option(
        "auto",
        "where streamed layers are kept: host memory, or the model's files (`tightwire prepare` makes files that are read "
        "faster); auto: host memory beside CUDA where it is large enough, else disk",
        ("auto", "host", "disk"),
    )
    weight_codec: str = option(
        "none",
        "what plain matrices of streamed layers are encoded with on their way, and where they wait; a prepared folder "
        "brings its own",
        tuple(WEIGHT_CODECS),
    )
    stream_layers: int | None = option(
        None, "layers to stream; default: as few as the memory allows, all of them if they all would fit", metavar="N"
    )
    stream_policy: str = option(
        "latency",
        "latency: memory goes to resident layers first, so that little streams; throughput: to the KV cache first, and a "
        "step takes as many prompt tokens as cost no more time than the layers' way (micro-batches share a layer)",
        ("latency", "throughput"),
    )
    device_memory: int | None = option(
        None, "most memory a rank may take, such as 4GiB; default: what is free", metavar="BYTES"
    )
    verify_weights: bool = option(
        False, "compare each layer of a prepared folder with its checksum when it is first read"
    )

    def __post_init__(self) -> None:
        for name in ("stream_layers", "device_memory"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        if self.weights == "auto":
            self._leave_out(("stream_layers",), "given beside --weights stream")
        if self.weights == "partition":
            want = "left out beside --weights partition, whose layers come from the other replicas"
            self._leave_out(("stream_from",), want)
        if self.weights == "resident":
            streaming = ("stream_from", "stream_layers", "stream_policy", "weight_codec")
            self._leave_out(streaming, "left out beside --weights resident, as nothing streams")

    def _leave_out(self, names: tuple[str, ...], want: str) -> None:
        for own in fields(self):
            if own.name in names:
                value = getattr(self, own.name)
                require(value == own.default, own.name, value, want)
