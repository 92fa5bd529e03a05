"""Which layers stay on the device and which come through the buffers, and the bytes that this takes.

Pure sums over sizes, made before anything is loaded; all ranks get the same plan.
"""

import msgspec
import torch

from tightwire.comm.codec import parse_codec
from tightwire.model.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import layer_tensors
from tightwire.model.weights.image import Image, make_image
from tightwire.model.weights.streamed import NUM_SLOTS
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

# With fewer there would be no more than the buffers hold.
LEAST_STREAMED = NUM_SLOTS + 1


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where each layer's weights are while they are not computed with. Everything resident, unless it says otherwise."""

    source: str = "resident"  # or stream
    origin: str = ""  # of streamed layers: host or disk
    codec: str = "none"  # what plain matrices go through on their way: none, int8, int4
    streamed: tuple[int, ...] = ()
    max_parts: int = 1  # a step's prompt tokens may go through each layer in so many parts of what one step else takes
    bytes_per_s: float | None = None  # what the source is slowed down to, for trying
    io: str = "buffered"  # how a prepared folder is read: direct or buffered
    verify: bool = False  # check each layer of a prepared folder when it is first read

    def resident(self, num_layers: int) -> tuple[int, ...]:
        return tuple(layer for layer in range(num_layers) if layer not in self.streamed)


EVERYTHING_RESIDENT = WeightPlan()


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """The layers to stream, as evenly between the others as can be: each then has the most time to come."""
    return tuple((2 * k + 1) * num_layers // (2 * num_streamed) for k in range(num_streamed))


def layer_images(
    config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: torch.dtype, codec: str = "none"
) -> list[Image]:
    """Of every layer, as it is computed with (codec none) or kept elsewhere."""
    chosen = parse_codec(WEIGHT_CODECS[codec])
    return [
        make_image(layer_tensors(config, shard, index), formats, dtype, chosen) for index in range(config.num_layers)
    ]


class WeightSizes:
    """Bytes of one rank's weights under any plan."""

    def __init__(
        self, config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: torch.dtype, codec: str = "none"
    ) -> None:
        self._total = weight_bytes(config, shard, formats, dtype.itemsize)
        self._plain = [image.num_bytes for image in layer_images(config, shard, formats, dtype)]
        self._stored = [image.num_bytes for image in layer_images(config, shard, formats, dtype, codec)]
        self._encoded = self._plain != self._stored

    def on_device(self, plan: WeightPlan) -> int:
        """Resident weights, and the buffers that the others come through."""
        if not plan.streamed:
            return self._total
        buffers = NUM_SLOTS * max(self._plain[layer] for layer in plan.streamed)
        return self._total - sum(self._plain[layer] for layer in plan.streamed) + buffers

    def on_host(self, plan: WeightPlan) -> int:
        """Beside that, where the host is not the device: what streams, if it is kept there, or else what passes through."""
        if not plan.streamed:
            return 0
        if plan.origin == "host":
            return sum(self._stored[layer] for layer in plan.streamed)
        return NUM_SLOTS * max(self._stored[layer] for layer in plan.streamed)

    def extra_on_cpu(self, plan: WeightPlan) -> int:
        """The same where host and device are one memory: encoded layers have buffers to be decoded from."""
        if plan.streamed and plan.origin == "disk":
            return NUM_SLOTS * max(self._stored[layer] for layer in plan.streamed) if self._encoded else 0
        return self.on_host(plan)

    def per_pass(self, plan: WeightPlan) -> int:
        """Bytes that come in for every step."""
        return sum(self._stored[layer] for layer in plan.streamed)
