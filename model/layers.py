"""``Layers``, one pass's computation between the ranks' sums, and the one that runs kernel by kernel."""

from typing import Protocol

from torch import Tensor

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.layer_ops import add_rms_norm, check_slots, rms_norm, rotate_and_cache, swiglu
from tightwire.kernels.linear import linear
from tightwire.kernels.spec.attention import PackedSequences
from tightwire.kernels.spec.lora import AdapterRows
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.adapters.product import AdapterProducts
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.step import Batch
from tightwire.model.weights.source import LayerWeights


class Layers(Protocol):
    """Computes one pass over T rows. ``attention`` and ``mlp`` of each layer are called in turn, in order.

    Each adds the update, which is the ranks' sum of the result before it, to the residual, and returns (T, D), this
    rank's part of the next sum. Call ``place`` for a layer before it is computed, and do not release it earlier.
    """

    residual_TD: Tensor

    def place(self, index: int, weights: LayerWeights) -> None:
        """Use these weights, and the cache's layer ``index``, when the layer is computed."""

    def attention(self, index: int, update_TD: Tensor | None) -> Tensor:
        """Compute layer ``index``'s norm and attention. ``update_TD``: None in the first layer."""
        ...

    def mlp(self, index: int, update_TD: Tensor) -> Tensor:
        """Compute layer ``index``'s norm and MLP."""
        ...

    def finish(self, update_TD: Tensor) -> Tensor:
        """Return (T, D) hidden states before the final norm."""
        ...


class EagerLayers:
    """``Layers`` of any batch, kernel by kernel."""

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        cache: CacheSource,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        residual_TD: Tensor,
        adapters: AdapterProducts | None = None,
    ) -> None:
        """``angles``: cosine and sine (S, E/2) of every position. ``residual_TD``: the embeddings; sums have its dtype."""
        self._config, self._shard, self._cache, self._batch = config, shard, cache, batch
        self._adapters = adapters
        self._adapted = None if batch.adapters_T is None else AdapterRows.of(batch.adapters_T)
        self._sequences = PackedSequences(
            batch.query_start_B1, batch.context_lens_B, batch.block_tables_BM, batch.num_decode_rows
        )
        self._head_groups = shard.head_groups(config.heads_per_kv_head)
        self._cos_TE, self._sin_TE = (angle_SE[batch.positions_T] for angle_SE in angles)
        self._placed: dict[int, LayerWeights] = {}
        self.residual_TD = residual_TD
        if cache.device.type == "cpu":
            check_slots(batch.slots_T, cache.num_blocks * cache.block_size)

    def place(self, index: int, weights: LayerWeights) -> None:
        self._placed[index] = weights

    def attention(self, index: int, update_TD: Tensor | None) -> Tensor:
        """Only rank 0 has the bias, so the sum over the ranks adds it once."""
        batch, head_dim, num_decode = self._batch, self._config.head_dim, self._batch.num_decode_rows
        weights = self._placed[index]
        x_TD = self._normed(update_TD, weights.attention_norm)
        qkv_TO = linear(x_TD, weights.qkv, weights.qkv_bias, num_decode_rows=num_decode)
        self._adapt("qkv", index, x_TD, qkv_TO)
        qkv_THE = qkv_TO.view(-1, self._shard.local_heads + 2 * self._shard.local_kv_heads, head_dim)
        keys_NKPE, values_NKPE = self._cache.layer(index)  # waits for a transfer; as late as possible
        placed = keys_NKPE, values_NKPE, batch.slots_T
        q_THE = rotate_and_cache(qkv_THE, self._cos_TE, self._sin_TE, *placed, slots_are_checked=True)
        mixed_THE = paged_attention(q_THE, keys_NKPE, values_NKPE, self._sequences, head_dim**-0.5, self._head_groups)
        mixed_TF = mixed_THE.flatten(1)
        partial_TD = self._row_parallel(mixed_TF, weights.attention_out, weights.attention_out_bias)
        return self._adapt("attention_out", index, mixed_TF, partial_TD)

    def mlp(self, index: int, update_TD: Tensor) -> Tensor:
        weights = self._placed[index]
        x_TD = self._normed(update_TD, weights.mlp_norm)
        num_decode = self._batch.num_decode_rows
        gate_up_TF = linear(x_TD, weights.gate_up, weights.gate_up_bias, num_decode_rows=num_decode)
        gated_TF = swiglu(self._adapt("gate_up", index, x_TD, gate_up_TF))
        partial_TD = self._row_parallel(gated_TF, weights.down, weights.down_bias)
        return self._adapt("down", index, gated_TF, partial_TD)

    def finish(self, update_TD: Tensor) -> Tensor:
        return self.residual_TD + update_TD

    def _normed(self, update_TD: Tensor | None, norm: Tensor) -> Tensor:
        """Add the update to the residual, and return the norm of the sum."""
        eps = self._config.norm_eps
        if update_TD is None:
            return rms_norm(self.residual_TD, norm, eps)
        normed_TD, self.residual_TD = add_rms_norm(update_TD, self.residual_TD, norm, eps)
        return normed_TD

    def _adapt(self, site: str, index: int, x_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Add the adapters' products to ``out``, and return it."""
        if self._adapted is not None:
            assert self._adapters is not None, "a step with adapters, and none were loaded"
            self._adapters.add(site, index, x_TD, out_TO, self._adapted)
        return out_TO

    def _row_parallel(self, x_TF: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        dtype = self.residual_TD.dtype
        return linear(x_TF, weight, bias, num_decode_rows=self._batch.num_decode_rows, out_dtype=dtype)
