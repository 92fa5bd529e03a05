"""The paged KV cache of one rank: fixed-size blocks of P tokens, addressed through block tables."""

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.step_arrays import StepArrays


class CacheSource:
    """Provides each layer's keys and values to the passes of every step.

    Each call of ``layer(i)`` needs one call of ``release(i)``; the result is valid until the last one. Several passes
    of a step may hold the same layer.
    """

    num_blocks: int  # that the tables returned by ``begin`` can refer to
    block_size: int
    block_stride: int  # elements between consecutive blocks, in keys and in values, the same in every layer
    dtype: torch.dtype
    device: torch.device
    layers_at_a_time: int | None = None  # that a pass may hold; None: all

    def begin(self, step: StepArrays) -> StepArrays:
        """Prepare the next step and return it with block numbers that index the results of ``layer``."""
        return step

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (N, local_K, P, E); raises CacheError if they do not arrive in time."""
        raise NotImplementedError

    def release(self, index: int) -> None:
        """End a pass's use of the layer."""

    def close(self) -> None:
        """Stop the threads that fetch layers, if there are any. May be called twice."""


class KVCache(CacheSource):
    """``CacheSource`` with all layers on the device.

    A block holds the same tokens in every layer and on every rank. Attention kernels read one block of one head as a
    unit, so the layout (N, K, P, E) keeps it contiguous.
    """

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the whole cache. On a CPU, pages take no physical memory until they are first written."""
        shape = (config.num_layers, num_blocks, shard.local_kv_heads, block_size, config.head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        self.block_stride = keys.stride(1)
        self._layers = tuple(zip(keys.unbind(), values.unbind(), strict=True))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]
