"""Flags of streamed and partitioned weights."""

from dataclasses import dataclass, fields

from tightwire.model.weights import WEIGHT_CODECS
from tightwire.option import option, require, require_declared
from tightwire.sizes import parse_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOptions:
    """Placement of weights: resident, streamed or shared by replicas."""

    weights: str = option(
        "auto",
        "resident: all layers on the device; stream: layers that do not fit are transferred in every step through two buffers, "
        "each while the one before it is computed; partition (needs --dp 2 or more): each replica of a node keeps a part of "
        "every layer and gathers it before use; auto: resident if they fit, else partition if replicas share a node's memory "
        "(on the GPUs of a host: if layers arrive clearly faster from other GPUs and enough cache is left), else stream",
        ("auto", "resident", "stream", "partition"),
    )
    stream_from: str = option(
        "auto",
        "where streamed layers are stored: in host memory, or in the model's files (`tightwire prepare` makes files that are "
        "faster to read); auto: in host memory with CUDA if it is large enough, else on disk",
        ("auto", "host", "disk"),
    )
    weight_codec: str = option(
        "none",
        "codec of the unpacked matrices of streamed layers, in storage and during the transfer: it saves transferred bytes, not "
        "memory. A prepared folder keeps the one that it was made with",
        tuple(WEIGHT_CODECS),
    )
    stream_layers: int | None = option(
        None,
        "layers to stream; default: as few as the memory allows, or all of them if all would fit",
        least=1,
    )
    stream_policy: str = option(
        "latency",
        "latency: memory goes to resident layers first, so that few layers stream; throughput: memory goes to the KV cache "
        "first, and a step takes as many prompt tokens as can be computed while the layers arrive (micro-batches share a layer)",
        ("latency", "throughput"),
    )
    device_memory: int | None = option(
        None,
        "most memory that a rank may use, such as 4GiB; default: all free memory",
        metavar="BYTES",
        least=1,
        parse=parse_memory,
    )

    def __post_init__(self) -> None:
        require_declared(self)
        if self.weights == "auto":
            self._leave_out(("stream_layers",), "given only with --weights stream")
        if self.weights == "partition":
            want = "left out with --weights partition, where layers come from the other replicas"
            self._leave_out(("stream_from",), want)
        if self.weights == "resident":
            streaming = ("stream_from", "stream_layers", "stream_policy", "weight_codec")
            self._leave_out(streaming, "left out with --weights resident, because nothing streams")

    def _leave_out(self, names: tuple[str, ...], want: str) -> None:
        for own in fields(self):
            if own.name in names:
                value = getattr(self, own.name)
                require(value == own.default, own.name, value, want)
