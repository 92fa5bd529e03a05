"""The paged KV cache of one rank: fixed blocks of P tokens, named by a block table, never moved or copied."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.model.config import LlamaConfig
from tightwire.model.layout import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Keys and values of all layers. A block holds the same tokens in every layer and on every rank.

    Layout (L, N, K, P, E): one block of one head is contiguous, which is what an attention kernel reads at a time.
    """

    keys: Tensor  # (L, N, local_K, P, E)
    values: Tensor

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]


def make_kv_cache(
    config: LlamaConfig, shard: Shard, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate the whole cache. On a CPU the pages cost nothing until they are first written."""
    shape = (config.num_layers, num_blocks, shard.local_kv_heads, block_size, config.head_dim)
    return KVCache(
        keys=torch.empty(shape, dtype=dtype, device=device), values=torch.empty(shape, dtype=dtype, device=device)
    )
