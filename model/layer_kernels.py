"""``Layers``, one pass's computation between the ranks' sums, and the one that runs kernel by kernel."""

from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.layer_ops import add_rms_norm, check_slots, norm_linear, rms_norm, rotate_and_cache, swiglu
from tightwire.kernels.linear import gated_linear, linear
from tightwire.kernels.spec.attention import AttentionForm, PackedSequences
from tightwire.kernels.spec.layer_ops import HeadNorms, NormForm, Rotation, RowProduct, SumNorms
from tightwire.kernels.spec.lora import AdapterRows
from tightwire.kernels.spec.packed import Matrix, Weight
from tightwire.model.adapters.product import AdapterProducts
from tightwire.model.cache.kv_cache import CacheSource, KeyBiases
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.step import Batch
from tightwire.model.weights.source import LayerWeights
from tightwire.model.weights.stage import JoinedRows

_Norms = tuple[Tensor | None, Tensor | None]  # of the residual's sum, and of the update before


class Layers(Protocol):
    """Computes one pass over T rows. ``attention`` and ``mlp`` of each layer are called in turn, in order.

    Each adds the update, which is the ranks' sum of the result before it, to the residual, and returns (T, D), this
    rank's part of the next sum. Call ``place`` for a layer before it is computed, and do not release it earlier.
    """

    residual_TD: Tensor
    form: NormForm  # of the model's norms

    def place(self, index: int, weights: LayerWeights) -> None:
        """Use these weights, and the cache's layer ``index``, when the layer is computed."""

    def attention(self, index: int, update_TD: Tensor | None) -> Tensor:
        """Compute layer ``index``'s norm and attention. ``update_TD``: None in the first layer."""
        ...

    def mlp(self, index: int, update_TD: Tensor) -> Tensor:
        """Compute layer ``index``'s norm and MLP; after the last one, rows that nobody needs may be 0."""
        ...

    def finish(self, update_TD: Tensor, last_norm: Tensor | None) -> Tensor:
        """Return (T, D) hidden states before the final norm: the residual plus the last update, by ``last_norm`` if there is one."""
        residual_TD = self.residual_TD
        if last_norm is None and self.form.scale == 1.0:
            return residual_TD + update_TD
        dtype = residual_TD.dtype if last_norm is None else last_norm.dtype
        return add_rms_norm(update_TD, residual_TD, SumNorms(None, self.form, last_norm, dtype))[1]


def norm_form(config: LlamaConfig) -> NormForm:
    """Return what the model's norms have in common."""
    return NormForm(config.norm_eps, config.norm_offset, config.residual_scale)


class EagerLayers(Layers):
    """``Layers`` of any batch, kernel by kernel."""

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        cache: CacheSource,
        key_biases: KeyBiases,
        batch: Batch,
        residual_TD: Tensor,
        adapters: AdapterProducts | None = None,
    ) -> None:
        """``residual_TD``: the embeddings; sums have its dtype."""
        self._config, self._shard, self._cache, self._batch = config, shard, cache, batch
        self._adapters, self._key_biases = adapters, key_biases
        self._adapted = None if batch.adapters_T is None else AdapterRows.of(batch.adapters_T)
        lens, device, angles = (batch.query_start_B1, batch.context_lens_B), cache.device, key_biases.angles
        num_decode = batch.num_decode_rows  # one launch of zeros for all layers, which follow each other
        counts = num_decode, shard.local_kv_heads
        arrivals_TK = torch.zeros(counts, dtype=torch.int32, device=device) if device.type == "cuda" else None
        self._sequences = [PackedSequences(*lens, table, num_decode, arrivals_TK) for table in batch.block_tables_LBM]
        self._head_groups = shard.head_groups(config.heads_per_kv_head)
        self.form, self._gelu = norm_form(config), config.activation == "gelu_tanh"
        rows = {(cos, sin): (cos[batch.positions_T], sin[batch.positions_T]) for cos, sin in set(angles)}
        self._angles = [rows[table] for table in angles]
        self._placed: dict[int, LayerWeights] = {}
        self.residual_TD = residual_TD
        if device.type == "cpu":
            check_slots(batch.slots_LT.flatten(), cache.num_blocks * cache.block_size)

    def place(self, index: int, weights: LayerWeights) -> None:
        self._placed[index] = weights

    def attention(self, index: int, update_TD: Tensor | None) -> Tensor:
        weights, cache = self._placed[index], self._cache
        norms = weights.attention_norm, weights.attention_update_norm
        if weights.q_norm is not None or cache.kv_dtype != cache.dtype or not self._fuses(weights.qkv, norms):
            return self.attend(index, self.project(index, update_TD))
        rotation = self._rotation(index)
        q_TO = self._fused(update_TD, norms, RowProduct(weights.qkv, weights.qkv_bias, rotation=rotation))
        return self._mix(index, q_TO.view(-1, self._shard.local_heads, self._config.head_dim), rotation)

    def project(self, index: int, update_TD: Tensor | None) -> Tensor:
        """Compute the layer's norm and return its queries, keys and values, (T, H + 2 K, E)."""
        weights = self._placed[index]
        norms = weights.attention_norm, weights.attention_update_norm
        bias_O, _ = self._key_biases.split(index, weights.qkv_bias)
        if self._fuses(weights.qkv, norms):
            qkv_TO = self._fused(update_TD, norms, RowProduct(weights.qkv, bias_O))
        else:
            x_TD = self._normed(update_TD, *norms)
            qkv_TO = self.column_parallel("qkv", index, x_TD, bias_O, self._batch.num_decode_rows)
            self._adapt("qkv", index, x_TD, qkv_TO)
        num_heads = self._shard.local_heads + 2 * self._shard.local_kv_heads
        return qkv_TO.view(-1, num_heads, self._config.head_dim)

    def square_sums(self, qkv_THE: Tensor) -> Tensor:
        """Return (T, 2) float32, the squares of this rank's queries and keys, summed; heads on two ranks count once."""
        num_heads = self._shard.local_heads
        # True if the rank before holds the first KV head too.
        is_shared = self._shard.query_heads.start % self._config.heads_per_kv_head != 0
        first_key = num_heads + is_shared
        keys = slice(first_key, num_heads + self._shard.local_kv_heads)
        parts = qkv_THE[:, :num_heads], qkv_THE[:, keys]
        return torch.stack([part.flatten(1).float().square().sum(1) for part in parts], dim=1)

    def attend(self, index: int, qkv_THE: Tensor, mean_squares_T2: Tensor | None = None) -> Tensor:
        """Compute attention and its output projection. ``mean_squares``: of all ranks' queries and keys."""
        weights, norms = self._placed[index], None
        if weights.q_norm is not None and weights.k_norm is not None:
            whole = self._config.qk_norm == "projection"
            norms = HeadNorms(weights.q_norm, weights.k_norm, self.form, whole, mean_squares_T2)
        rotation = self._rotation(index)
        return self._mix(index, rotate_and_cache(qkv_THE, rotation, norms, slots_are_checked=True), rotation)

    def _rotation(self, index: int) -> Rotation:
        """Call it as late as possible, once: it waits for a transfer."""
        group, _ = self._cache.groups.places[index]
        return Rotation(*self._angles[index], *self._cache.layer(index), self._batch.slots_LT[group])

    def _mix(self, index: int, q_THE: Tensor, rotation: Rotation) -> Tensor:
        """Attend, and multiply with the output projection. Only rank 0 has its bias, so the sum over the ranks adds it once."""
        config, weights, caches = self._config, self._placed[index], (rotation.k_cache_NKPE, rotation.v_cache_NKPE)
        _, key_bias = self._key_biases.split(index, weights.qkv_bias)
        form = AttentionForm(config.scale, self._head_groups, config.window_of(index), config.score_cap, key_bias)
        sequences = self._sequences[self._cache.groups.places[index][0]]
        mixed_TF = paged_attention(q_THE, *caches, sequences, form).flatten(1)
        out = weights.attention_out, weights.attention_out_bias
        partial_TD = self._row_parallel(mixed_TF, *out, self._batch.num_decode_rows)
        return self._adapt("attention_out", index, mixed_TF, partial_TD)

    def mlp(self, index: int, update_TD: Tensor) -> Tensor:
        weights = self._placed[index]
        norms, num_decode, needed_R = (weights.mlp_norm, weights.mlp_update_norm), self._batch.num_decode_rows, None
        if self._fuses(weights.gate_up, norms):
            product = RowProduct(weights.gate_up, weights.gate_up_bias, self._gelu)
            gated_TF = self._fused(update_TD, norms, product)
        else:
            x_TD = self._normed(update_TD, *norms)
            if index == self._config.num_layers - 1 and self._batch.needed is not None and self._adapted is None:
                needed_R, num_decode = self._batch.needed
                x_TD = x_TD[needed_R]
            gate_up = weights.gate_up, weights.gate_up_bias
            if self._adapted is None and not isinstance(weights.gate_up, JoinedRows):
                gated_TF = gated_linear(x_TD, *gate_up, num_decode_rows=num_decode, gelu=self._gelu)
            else:
                gate_up_TF = self.column_parallel("gate_up", index, x_TD, weights.gate_up_bias, num_decode)
                gated_TF = swiglu(self._adapt("gate_up", index, x_TD, gate_up_TF), gelu=self._gelu)
        partial_TD = self._row_parallel(gated_TF, weights.down, weights.down_bias, num_decode)
        if needed_R is not None:
            return torch.zeros_like(self.residual_TD, dtype=partial_TD.dtype).index_copy_(0, needed_R, partial_TD)
        return self._adapt("down", index, gated_TF, partial_TD)

    def _fuses(self, weight: Weight, norms: _Norms) -> TypeGuard[Tensor]:
        return self._batch.fuses and isinstance(weight, Tensor) and norms[0] is not None and norms[1] is None

    def _fused(self, update_TD: Tensor | None, norms: _Norms, product: RowProduct) -> Tensor:
        """Add the update, and return what ``norm_linear`` computes of the sum."""
        assert norms[0] is not None
        out_TO, self.residual_TD = norm_linear(update_TD, self.residual_TD, norms[0], self.form, product)
        return out_TO

    def _normed(self, update_TD: Tensor | None, norm: Tensor | None, update_norm: Tensor | None) -> Tensor:
        """Add the update to the residual, and return the norm of the sum."""
        dtype, residual_TD = self._cache.dtype, self.residual_TD
        if update_TD is None:
            return residual_TD.to(dtype) if norm is None else rms_norm(residual_TD, norm, self.form)
        norms = SumNorms(norm, self.form, update_norm, dtype)
        normed_TD, self.residual_TD = add_rms_norm(update_TD, residual_TD, norms)
        return normed_TD

    def _adapt(self, site: str, index: int, x_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Add the adapters' products to ``out``, and return it."""
        if self._adapted is not None:
            assert self._adapters is not None, "a step with adapters, and none were loaded"
            self._adapters.add(site, index, x_TD, out_TO, self._adapted)
        return out_TO

    def column_parallel(self, site: str, index: int, x_TD: Tensor, bias_O: Tensor | None, num_decode: int) -> Tensor:
        """Multiply with the matrix ``site`` of the layer, whose rows are split over the ranks."""
        weight = getattr(self._placed[index], site)
        if isinstance(weight, JoinedRows):
            return weight.multiply(x_TD, bias_O)
        return linear(x_TD, weight, bias_O, num_decode_rows=num_decode)

    def _row_parallel(self, x_TF: Tensor, weight: Matrix, bias: Tensor | None, num_decode_rows: int) -> Tensor:
        return linear(x_TF, weight, bias, num_decode_rows=num_decode_rows, out_dtype=self.residual_TD.dtype)
