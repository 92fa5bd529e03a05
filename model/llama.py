"""Runs the Llama forward pass of one rank over packed sequences and a paged cache. Start with ``Llama._pass``.

``EagerLayers`` computes any batch kernel by kernel; ``decode_program`` the same for decode rows on a CPU, many parts at once.

Source: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783.
"""

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Feedback
from tightwire.comm.lane import Lane
from tightwire.comm.protocols import KernelSums
from tightwire.kernels.attention import paged_attention
from tightwire.kernels.cpu.library import available
from tightwire.kernels.layer_ops import add_rms_norm, check_slots, rms_norm, rotate_and_cache, swiglu
from tightwire.kernels.linear import linear
from tightwire.kernels.spec.attention import PackedSequences
from tightwire.kernels.spec.lora import AdapterRows
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.adapters.slots import AdapterSlots
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.decode_program import DecodeProgram
from tightwire.model.layout import Shard
from tightwire.model.parallel import RowSums, TensorParallel
from tightwire.model.step import Batch
from tightwire.model.weights.source import LayerWeights, WeightSource

Collective = Callable[[], Tensor]  # all ranks call their collectives in the same order


class Llama:
    """One rank's layers. ``forward`` writes the new tokens' keys and values to the cache."""

    def __init__(
        self,
        config: LlamaConfig,
        parallel: TensorParallel,
        weights: WeightSource,
        cache: CacheSource,
        max_positions: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._config, self._parallel, self.weights, self.cache = config, parallel, weights, cache
        self.adapters = adapters
        self._angles = rope_table(config, max_positions, cache.device)
        on_cpu = cache.device.type == "cpu"
        # Of partial sums and of the residual. Rounding the residual costs more accuracy than all else in 16 bits.
        self._residual_dtype = torch.float32 if on_cpu else parallel.sum_dtype or cache.dtype
        sites = [(site, layer) for layer in range(config.num_layers) for site in ("o_proj", "down_proj")]
        # The sum after each part, for each policy. Part 2l is layer l's attention, part 2l + 1 its MLP.
        self._sums = [
            [parallel.row_sums(site, layer, policy) for site, layer in sites] for policy in range(parallel.num_policies)
        ]
        self._spans = weights.spans
        if cache.layers_at_a_time is not None:
            self._spans = [range(layer, layer + 1) for layer in range(config.num_layers)]
        self._program = None
        if on_cpu and available():
            self._program = DecodeProgram(config, parallel.shard, cache, self._angles, adapters)

    @torch.inference_mode()
    def forward(self, *parts: Batch, lane: Lane | None = None) -> Tensor:
        """Compute a step in one or several parts; returns (T, D) hidden states before the final norm.

        Each layer computes all parts before the next layer starts, so its weights are fetched once. A row's bits equal
        those of the unsplit step if its sum does not depend on the other rows in its message. ``lane``: sums one part
        while the next is computed; None: sums and computation do not overlap.
        """
        start = _call if lane is None else lambda collective: lane.start(collective).wait
        program = self._program if len(parts) == 1 and parts[0].is_decode else None
        passes = [self._pass(part, program) for part in parts]
        results = [start(next(layers)) for layers in passes]
        hidden: list[Tensor] = []
        while not hidden:  # all passes have the same number of collectives, so they end in the same round
            for number, layers in enumerate(passes):
                try:
                    results[number] = start(layers.send(results[number]()))
                except StopIteration as end:
                    hidden.append(end.value)
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def _pass(self, batch: Batch, program: DecodeProgram | None) -> Generator[Collective, Tensor, Tensor]:
        """Run one pass over the layers: yield each collective, receive its result, and return (T, D).

        Each part's norm adds the previous sum to the residual stream, so only the last sum is added here.
        """
        residual_TD = yield partial(self._embed, batch)
        if program is None:
            given = self.cache, self._angles, batch, residual_TD, self.adapters
            layers = EagerLayers(self._config, self._parallel.shard, *given)
        else:
            layers = program.begin(residual_TD, batch)
        update_TD: Tensor | None = None
        feedback = Feedback()
        for span in self._spans:
            for index in span:
                layers.place(index, self.weights.layer(index))
            update_TD = yield from self._run_span(span, layers, batch, update_TD, feedback)
            for index in span:
                self.weights.release(index)
                self.cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        return layers.residual_TD + update_TD

    def _run_span(
        self,
        span: range,
        layers: "EagerLayers | DecodeProgram",
        batch: Batch,
        update_TD: Tensor | None,
        feedback: Feedback,
    ) -> Generator[Collective, Tensor, Tensor]:
        """Run the parts of these layers, each followed by its sum over the ranks."""
        first, stop = 2 * span.start, 2 * span.stop
        sums = self._sums[batch.policy][first:stop]
        if isinstance(layers, DecodeProgram):
            if not any(sums):
                return layers.run_parts(first, stop, update_TD)
            in_kernel = self._sums_in_kernel(sums, layers.residual_TD)
            if in_kernel is not None:
                return (yield partial(layers.run_and_sum, first, update_TD, *in_kernel))
        unsummed: _UnsummedRows | None = None
        for part, row_sums in enumerate(sums, start=first):
            partial_TD = layers.run(part, update_TD)
            if unsummed is not None:
                unsummed.put_back(layers.residual_TD, partial_TD)
            update_TD = yield partial(
                self._parallel.sum_rows, partial_TD, row_sums, feedback, num_decode_rows=batch.num_decode_rows
            )
            rows = slice(0) if row_sums is None else row_sums.dropped_rows(len(update_TD), batch.num_decode_rows)
            unsummed = None
            if rows.start != rows.stop and rows.stop:
                update_TD = update_TD.clone()  # the next part overwrites its buffer
                unsummed = _UnsummedRows(rows, update_TD, layers.residual_TD)
        assert update_TD is not None, "a span has at least one layer"
        return update_TD

    def _sums_in_kernel(
        self, sums: Sequence[RowSums | None], rows_TD: Tensor
    ) -> tuple[KernelSums, Sequence[str]] | None:
        """Return the arguments for sums inside the decode kernel, and their labels; None if it cannot sum."""
        known = [row_sums for row_sums in sums if row_sums is not None]
        kernel_sums = self._parallel.sums_in_kernel({row_sums.generated for row_sums in known}, rows_TD)
        return None if kernel_sums is None else (kernel_sums, [row_sums.label for row_sums in known])

    def _embed(self, batch: Batch) -> Tensor:
        table = self.weights.outer.embedding
        return self._parallel.embed(table, batch.token_ids_T, batch.policy, batch.phase, self._residual_dtype)

    @torch.inference_mode()
    def last_chosen(self, chosen_R: Tensor | None, num: int, phase: str) -> Tensor:
        """Return (num,) int32 on every rank; see ``TensorParallel.last_chosen``."""
        return self._parallel.last_chosen(chosen_R, num, phase)

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor, num_candidates: int = 0, phase: str = "") -> Tensor | None:
        """Return (R, V) float32 on rank 0, None elsewhere; see ``TensorParallel.logits``."""
        outer = self.weights.outer
        normed_RD = rms_norm(hidden_RD, outer.final_norm, self._config.norm_eps)
        return self._parallel.logits(normed_RD, outer.head, num_candidates, phase)

    @torch.inference_mode()
    def local_logits(self, hidden_RD: Tensor) -> Tensor:
        """Return this rank's columns, (R, local_V) float32."""
        outer = self.weights.outer
        normed_RD = rms_norm(hidden_RD, outer.final_norm, self._config.norm_eps)
        return linear(normed_RD, outer.head, out_dtype=torch.float32)


class _UnsummedRows:
    """Rows whose sum after attention is dropped: the MLP sees the residual plus this rank's part only.

    Afterwards the residual is that of all ranks again, and this rank's part goes into the sum after the MLP. So the ranks'
    residuals have equal bits after each layer. Source: SPD, Sync-Point Drop, ICML 2025.
    """

    def __init__(self, rows: slice, update_TD: Tensor, residual_TD: Tensor) -> None:
        self._rows, self._part_RD, self._residual_RD = rows, update_TD[rows], residual_TD[rows].clone()

    def put_back(self, residual_TD: Tensor, partial_TD: Tensor) -> None:
        """Call after the MLP: restore the residual's rows, and add this rank's part to ``partial_TD``."""
        residual_TD[self._rows] = self._residual_RD
        partial_TD[self._rows] += self._part_RD


def _call(collective: Collective) -> Callable[[], Tensor]:
    result = collective()
    return lambda: result


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
        adapters: AdapterSlots | None = None,
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
        """Use these weights when the parts of layer ``index`` run."""
        self._placed[index] = weights

    def run(self, part: int, update_TD: Tensor | None) -> Tensor:
        """Return (T, D), this rank's part of the sum. ``update_TD``: the last part's sum; None for the first part."""
        index, is_mlp = divmod(part, 2)
        weights, eps = self._placed[index], self._config.norm_eps
        norm = weights.mlp_norm if is_mlp else weights.attention_norm
        if update_TD is None:
            normed_TD = rms_norm(self.residual_TD, norm, eps)
        else:
            normed_TD, self.residual_TD = add_rms_norm(update_TD, self.residual_TD, norm, eps)
        return (self._mlp if is_mlp else self._attention)(normed_TD, weights, index)

    def _attention(self, x_TD: Tensor, weights: LayerWeights, index: int) -> Tensor:
        """Return (T, D). Only rank 0 has the bias, so the sum over the ranks adds it once."""
        batch, head_dim, num_decode = self._batch, self._config.head_dim, self._batch.num_decode_rows
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

    def _mlp(self, x_TD: Tensor, weights: LayerWeights, index: int) -> Tensor:
        num_decode = self._batch.num_decode_rows
        gate_up_TF = linear(x_TD, weights.gate_up, weights.gate_up_bias, num_decode_rows=num_decode)
        gated_TF = swiglu(self._adapt("gate_up", index, x_TD, gate_up_TF))
        partial_TD = self._row_parallel(gated_TF, weights.down, weights.down_bias)
        return self._adapt("down", index, gated_TF, partial_TD)

    def _adapt(self, site: str, index: int, x_TD: Tensor, out_TO: Tensor) -> Tensor:
        """Add the adapters' products to ``out``, and return it."""
        if self._adapted is not None:
            assert self._adapters is not None, "a step with adapters, and there are no slots"
            self._adapters.add(site, index, x_TD, out_TO, self._adapted)
        return out_TO

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
