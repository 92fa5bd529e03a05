"""Runs one rank's layers kernel by kernel, for any batch on any device.

``decode_program`` computes the same for decode rows on a CPU, with many parts in one kernel.
"""

import math

import torch
from torch import Tensor

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.layer_ops import add_rms_norm, rms_norm, rotate_and_cache, swiglu
from tightwire.kernels.linear import linear
from tightwire.kernels.spec.attention import PackedSequences
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.layout import Shard
from tightwire.model.step_arrays import Batch
from tightwire.model.weights.source import LayerWeights


class EagerLayers:
    """Computes one pass: part 2l is layer l's norm and attention, part 2l + 1 its norm and MLP."""

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        cache: CacheSource,
        angles: tuple[Tensor, Tensor],
        batch: Batch,
        residual_TD: Tensor,
    ) -> None:
        """``angles``: cosine and sine (S, E/2) of every position. ``residual_TD``: the embeddings; sums have its dtype."""
        self._config, self._shard, self._cache, self._batch = config, shard, cache, batch
        self._sequences = PackedSequences(
            batch.query_start_B1, batch.context_lens_B, batch.block_tables_BM, batch.num_decode_rows
        )
        self._head_groups = shard.head_groups(config.heads_per_kv_head)
        self._cos_TE, self._sin_TE = (angle_SE[batch.positions_T] for angle_SE in angles)
        self._placed: dict[int, LayerWeights] = {}
        self.residual_TD = residual_TD

    def place(self, index: int, weights: LayerWeights) -> None:
        """Use these weights when the parts of layer ``index`` run."""
        self._placed[index] = weights

    def run(self, part: int, update_TD: Tensor | None) -> Tensor:
        """Return (T, D), this rank's part of the sum over the ranks.

        ``update_TD``: the ranks' sum of the previous part, which the norm adds to the residual; None for the first part.
        """
        index, is_mlp = divmod(part, 2)
        weights, eps = self._placed[index], self._config.norm_eps
        norm = weights.mlp_norm if is_mlp else weights.attention_norm
        if update_TD is None:
            normed_TD = rms_norm(self.residual_TD, norm, eps)
        else:
            normed_TD, self.residual_TD = add_rms_norm(update_TD, self.residual_TD, norm, eps)
        return self._mlp(normed_TD, weights) if is_mlp else self._attention(normed_TD, weights, index)

    def _attention(self, x_TD: Tensor, weights: LayerWeights, index: int) -> Tensor:
        """Return (T, D). Only rank 0 has the bias, so the sum over the ranks adds it once."""
        batch, head_dim, num_decode = self._batch, self._config.head_dim, self._batch.num_decode_rows
        qkv_TO = linear(x_TD, weights.qkv, weights.qkv_bias, num_decode_rows=num_decode)
        qkv_THE = qkv_TO.view(-1, self._shard.local_heads + 2 * self._shard.local_kv_heads, head_dim)
        keys_NKPE, values_NKPE = self._cache.layer(index)  # waits for a transfer; as late as possible
        q_THE = rotate_and_cache(qkv_THE, self._cos_TE, self._sin_TE, keys_NKPE, values_NKPE, batch.slots_T)
        mixed_THE = paged_attention(q_THE, keys_NKPE, values_NKPE, self._sequences, head_dim**-0.5, self._head_groups)
        return self._row_parallel(mixed_THE.flatten(1), weights.attention_out, weights.attention_out_bias)

    def _mlp(self, x_TD: Tensor, weights: LayerWeights) -> Tensor:
        num_decode = self._batch.num_decode_rows
        gated_TF = swiglu(linear(x_TD, weights.gate_up, weights.gate_up_bias, num_decode_rows=num_decode))
        return self._row_parallel(gated_TF, weights.down, weights.down_bias)

    def _row_parallel(self, x_TF: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        dtype = self.residual_TD.dtype
        return linear(x_TF, weight, bias, num_decode_rows=self._batch.num_decode_rows, out_dtype=dtype)


def rope_table(config: LlamaConfig, max_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of position x frequency, both (max_positions, E/2) float32.

    Frequencies are ``theta ** (-2i/E)``, scaled by ``config.rope_scaling``. The float32 arithmetic is that of
    transformers, because equal tokens in float32 need equal bits.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = _stretched(1.0 / config.rope_theta**exponents, config.rope_scaling)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "none":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Divide frequencies of long wavelengths by ``factor``, keep short ones, and interpolate (Llama 3, 2407.21783).
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = ramp.clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
