"""Runs the Llama forward pass of one rank over packed sequences and a paged cache. Start with ``Llama._pass``.

Source: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.lane import Lane
from tightwire.comm.protocols import KernelSums
from tightwire.kernels.cpu.library import available
from tightwire.kernels.layer_ops import rms_norm
from tightwire.kernels.linear import linear
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.decode_program import DecodeProgram
from tightwire.model.eager_layers import EagerLayers, rope_table
from tightwire.model.parallel import RowSums, TensorParallel
from tightwire.model.step_arrays import Batch
from tightwire.model.weights.source import WeightSource

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
    ) -> None:
        self._config, self._parallel, self.weights, self.cache = config, parallel, weights, cache
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
            self._program = DecodeProgram(config, parallel.shard, cache, self._angles)

    @torch.inference_mode()
    def forward(self, *parts: Batch, lane: Lane | None = None) -> Tensor:
        """Compute a step in one or several parts; returns (T, D) hidden states before the final norm.

        Each layer computes all parts before the next layer starts, so its weights are fetched once. A row's bits equal
        those of the unsplit step if its sum does not depend on the other rows in its message.

        Args:
            lane: sums one part while the next is computed; None: sums and computation do not overlap.
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

        The order is embedding, sum; then in every layer attention, sum, MLP, sum. Each part's norm adds the previous
        sum to the residual stream, so only the last sum is added here. ``program`` runs the parts of a decode step on a
        CPU.
        """
        residual_TD = yield partial(self._embed, batch)
        if program is None:
            layers = EagerLayers(self._config, self._parallel.shard, self.cache, self._angles, batch, residual_TD)
        else:
            layers = program.begin(residual_TD, batch)
        update_TD: Tensor | None = None
        for span in self._spans:
            for index in span:
                layers.place(index, self.weights.layer(index))
            update_TD = yield from self._run_span(span, layers, batch, update_TD)
            for index in span:
                self.weights.release(index)
                self.cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        return layers.residual_TD + update_TD

    def _run_span(
        self, span: range, layers: EagerLayers | DecodeProgram, batch: Batch, update_TD: Tensor | None
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
        for part, row_sums in enumerate(sums, start=first):
            partial_TD = layers.run(part, update_TD)
            update_TD = yield partial(
                self._parallel.sum_rows, partial_TD, row_sums, num_decode_rows=batch.num_decode_rows
            )
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


def _call(collective: Collective) -> Callable[[], Tensor]:
    result = collective()
    return lambda: result
