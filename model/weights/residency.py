"""Which layers stay on the device and which come through the buffers, and the bytes that this takes.

Pure sums over sizes, made before anything is loaded; all ranks get the same plan.
"""

from collections.abc import Iterable

import msgspec
import torch

from tightwire.comm.codec.codec import parse_codec
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.fused import layer_tensors
from tightwire.model.weights.image import Image, make_image
from tightwire.model.weights.partition_cut import Cut
from tightwire.model.weights.streamed import NUM_SLOTS
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

# How partitioned layers are loaded: every node's ranks read what they keep, or all ranks together read everything once.
FILES, FIRST_TOUCH = "files", "first-touch"

# With fewer there would be no more than the buffers hold.
LEAST_STREAMED = NUM_SLOTS + 1


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where each layer's weights are while they are not computed with. Everything resident, unless it says otherwise."""

    source: str = (
        "resident"  # or stream: a rank has all of its layers; or partition: a share, its node's ranks the rest
    )
    origin: str = ""  # of streamed layers: host or disk; of partitioned ones: how they are loaded, files or first-touch
    num_nodes: int = 1  # that hold partitioned layers
    ranks_per_node: int = 1  # that share a partitioned shard, equally many on each node
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


def check_codec(codec: str, stored: Iterable[Image], formats: WeightFormats) -> None:
    """Whether a codec has anything to do in ``stored``, images of layers as they travel.

    Args:
        codec: its name, or ``none``.
    Raises:
        ValueError: it has not.
    """
    if codec != "none" and all(image.is_plain for image in stored):
        raise ValueError(
            f"{codec} has nothing to encode: the layers' matrices are packed ({formats.name}) and travel as they are; leave "
            "--weight-codec out, or have them unpacked first with --quantization none"
        )


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
        """Resident weights, and the buffers that the others come through; of partitioned layers the rank's share as well."""
        if not plan.streamed:
            return self._total
        buffers = NUM_SLOTS * max(self._plain[layer] for layer in plan.streamed)
        if plan.source == "partition" and plan.ranks_per_node > 1:
            buffers += self._to_decode(plan)
        return self._total - sum(self._plain[layer] for layer in plan.streamed) + buffers + self.kept(plan)

    def kept(self, plan: WeightPlan) -> int:
        """A rank's share of partitioned layers, which is where the ranks meet: on the device."""
        if plan.source != "partition":
            return 0
        cuts = [Cut(self._stored[layer], plan.num_nodes, plan.ranks_per_node) for layer in plan.streamed]
        return sum(cut.kept_bytes for cut in cuts)

    def on_host(self, plan: WeightPlan) -> int:
        """Beside that, where the host is not the device: what streams, if it is kept there, or else what passes through."""
        if not plan.streamed or plan.source == "partition":
            return 0
        if plan.origin == "host":
            return sum(self._stored[layer] for layer in plan.streamed)
        return NUM_SLOTS * max(self._stored[layer] for layer in plan.streamed)

    def in_pool(self, plan: WeightPlan, device: str) -> int:
        """Of the memory that ``device`` (cpu or cuda) computes from; a CPU's is the host's.

        Encoded layers have buffers there to be decoded from: on the host two, if they do not wait there; beside CUDA one, that
        is copied to.
        """
        if device == "cpu":
            waiting = self._to_decode(plan) if plan.streamed and plan.origin == "disk" else self.on_host(plan)
            return self.on_device(plan) + waiting
        return self.on_device(plan) + (self._to_decode(plan) // NUM_SLOTS if plan.source == "stream" else 0)

    def per_pass(self, plan: WeightPlan) -> int:
        """Bytes that come in for every step."""
        return sum(self._stored[layer] for layer in plan.streamed)

    def _to_decode(self, plan: WeightPlan) -> int:
        return NUM_SLOTS * max(self._stored[layer] for layer in plan.streamed) if self._encoded else 0
