"""Weights of one rank: resident, streamed or partitioned. Imports no torch. Start with `source`, then `load`."""

import msgspec

# By --weight-codec's name. Groups of 64 numbers: a model's rows are whole groups, and the scales take few bytes.
WEIGHT_CODECS = {"none": "none", "int8": "int8-g64", "int4": "int4-g64"}

QUANTIZATIONS = ("auto", "none", "int8", "int4")  # of --quantization
NUM_BUFFERS = 2  # of streamed layers: one is computed while the next arrives
LEAST_STREAMED = NUM_BUFFERS + 1  # fewer streamed layers would all fit in the buffers


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The storage of each layer's weights. By default all layers are resident."""

    source: str = "resident"  # or stream: each rank stores its streamed layers; or partition: a node's ranks share them
    origin: str = ""  # streamed layers: host or disk; partitioned layers: files
    ranks_per_node: int = 1  # number of ranks that share a partitioned shard
    codec: str = "none"  # for plain matrices of streamed layers: none, int8, int4
    streamed: tuple[int, ...] = ()
    max_parts: int = 1  # a step may be computed in up to this many parts, each as long as a usual step
    bytes_per_s: float | None = None  # rate limit of the source, for experiments
    io: str = "buffered"  # reads of a prepared folder: direct or buffered

    def resident(self, num_layers: int) -> tuple[int, ...]:
        return tuple(layer for layer in range(num_layers) if layer not in self.streamed)


EVERYTHING_RESIDENT = WeightPlan()
