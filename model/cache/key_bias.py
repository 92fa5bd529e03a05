"""Biases of keys beside a cache in 8 bits: where the keys' projection has a bias, keys are cached without it.

Qwen2.5's biases reach 145 in one channel, where the rest of a key is about 1: rounded together, a code's step would be as large
as the other channels. Rotation is linear, so attention adds the rotated bias, exactly, when it reads keys.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.kernels.spec.attention import KeyBias
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.rope import Angles


class KeyBiases:
    """Splits the bias of each layer's queries, keys and values: what the projection adds, and what attention adds."""

    def __init__(self, config: LlamaConfig, shard: Shard, cache: CacheSource, angles: Sequence[Angles]) -> None:
        # A norm of the keys comes after the bias, and is not linear.
        self._apart = cache.kv_dtype == torch.int8 and config.qk_norm == "none"
        self._rows = slice(shard.local_heads, shard.local_heads + shard.local_kv_heads)
        self._head_dim, self._angles = config.head_dim, angles
        self._split: dict[int, tuple[Tensor, KeyBias]] = {}

    def split(self, index: int, qkv_bias: Tensor | None) -> tuple[Tensor | None, KeyBias | None]:
        """Return layer ``index``'s bias without that of keys, and that of keys; computed once, as weights never change."""
        if qkv_bias is None or not self._apart:
            return qkv_bias, None
        if index not in self._split:
            rest = qkv_bias.clone()
            keys_KE = rest.view(-1, self._head_dim)[self._rows]
            key_bias = KeyBias(keys_KE.to(torch.float32, copy=True), *self._angles[index])
            keys_KE.zero_()
            self._split[index] = rest, key_bias
        return self._split[index]
