"""Chooses the layers that stay on the device, and computes the bytes of a rank's weights under any plan."""

from collections.abc import Iterable

import torch

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights import NUM_BUFFERS, WeightPlan
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.packed_layer import PackedLayer, pack_model, weight_codec
from tightwire.model.weights.partition_store import PartitionCut


def check_codec(codec: str, stored: Iterable[PackedLayer], formats: WeightFormats) -> None:
    """Raise ValueError if the codec (a name of ``WEIGHT_CODECS``, or its full one) encodes nothing in ``stored``."""
    if codec != "none" and all(layer.is_plain for layer in stored):
        raise ValueError(
            f"--weight-codec {codec.partition('-')[0]} has nothing to encode: the layers' matrices are already packed "
            f"({formats.name}); leave it out, or unpack the matrices with --quantization none"
        )


class WeightSizes:
    """Bytes of one rank's weights under any plan."""

    def __init__(
        self, config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: torch.dtype, codec: str = "none"
    ) -> None:
        self._total = weight_bytes(config, shard, formats, dtype.itemsize)
        packed = pack_model(config, shard, formats, dtype, weight_codec(codec))
        self._plain = [layer.num_bytes for layer in packed.plain]
        self._stored = [layer.num_bytes for layer in packed.stored]
        self._encoded = self._plain != self._stored

    def on_device(self, plan: WeightPlan) -> int:
        """Return the bytes of resident weights, buffers and this rank's share of partitioned layers."""
        if not plan.streamed:
            return self._total
        buffers = NUM_BUFFERS * max(self._plain[layer] for layer in plan.streamed)
        if plan.source == "partition" and plan.ranks_per_node > 1:
            buffers += self._to_decode(plan)
        return self._total - sum(self._plain[layer] for layer in plan.streamed) + buffers + self.kept(plan)

    def kept(self, plan: WeightPlan) -> int:
        """Return the bytes of a rank's share of partitioned layers, which is on the device."""
        if plan.source != "partition":
            return 0
        return sum(PartitionCut(self._stored[layer], plan.ranks_per_node).kept_bytes for layer in plan.streamed)

    def on_host(self, plan: WeightPlan) -> int:
        """Return the host memory besides a separate device: streamed layers with origin host, otherwise buffers."""
        if not plan.streamed or plan.source == "partition":
            return 0
        if plan.origin == "host":
            return sum(self._stored[layer] for layer in plan.streamed)
        return NUM_BUFFERS * max(self._stored[layer] for layer in plan.streamed)

    def in_pool(self, plan: WeightPlan, device: str) -> int:
        """Return the memory of ``device`` (cpu or cuda), with buffers from which encoded layers are decoded."""
        if device == "cpu":
            waiting = self._to_decode(plan) if plan.streamed and plan.origin == "disk" else self.on_host(plan)
            return self.on_device(plan) + waiting
        return self.on_device(plan) + (self._to_decode(plan) // NUM_BUFFERS if plan.source == "stream" else 0)

    def per_pass(self, plan: WeightPlan) -> int:
        """Return the stored bytes streamed in every pass."""
        return sum(self._stored[layer] for layer in plan.streamed)

    def _to_decode(self, plan: WeightPlan) -> int:
        return NUM_BUFFERS * max(self._stored[layer] for layer in plan.streamed) if self._encoded else 0
