"""The paged KV cache of one rank: fixed blocks of P tokens, listed in block tables."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.step_arrays import StepArrays


class CacheSource(Protocol):
    """Provides each layer's keys and values to passes, step after step.

    The result of ``layer(i)`` is valid until ``release(i)`` has been called as often; several passes of a step may share a
    layer.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks that the tables of a step may contain after ``begin``."""
        ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_stride(self) -> int:
        """Numbers from the keys of one block to those of the next, in every layer; the same for values."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def layers_at_a_time(self) -> int | None:
        """Layers that a pass may hold at once; None: all."""
        ...

    def begin(self, step: StepArrays) -> StepArrays:
        """Prepare the next step; returns it with the block numbers of ``layer``'s results."""
        ...

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values (N, local_K, P, E) each; waits until they are on the device.

        Raises:
            CacheError: they do not arrive.
        """
        ...

    def release(self, index: int) -> None: ...

    def close(self) -> None:
        """End the threads that fetch layers. May be called twice."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """``CacheSource`` with all layers on the device; blocks are never moved or copied.

    A block holds the same tokens in every layer and on every rank.

    Layout (N, K, P, E): one block of one head is contiguous, which is what an attention kernel reads at a time.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]  # keys and values (N, local_K, P, E)

    @property
    def num_blocks(self) -> int:
        return self._first.shape[0]

    @property
    def block_size(self) -> int:
        return self._first.shape[2]

    @property
    def block_stride(self) -> int:
        return self._first.stride(0)

    @property
    def dtype(self) -> torch.dtype:
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        return self._first.device

    @property
    def layers_at_a_time(self) -> None:
        return None

    def begin(self, step: StepArrays) -> StepArrays:
        return step

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]

    def release(self, index: int) -> None:
        """Layers stay."""

    def close(self) -> None:
        """There are no threads."""

    @property
    def _first(self) -> Tensor:
        return self.layers[0][0]


def make_kv_cache(
    config: LlamaConfig, shard: Shard, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate the whole cache. On a CPU the pages cost nothing until they are first written."""
    shape = (config.num_layers, num_blocks, shard.local_kv_heads, block_size, config.head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=device).unbind() for _ in range(2))
    return KVCache(layers=tuple(zip(keys, values, strict=True)))
