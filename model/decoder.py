"""Runs the forward pass of one rank over packed sequences and a paged cache. Start with ``Llama._pass``.

One pass over the layers, if each sum over the ranks is awaited where it is needed, is this loop:

    layers, update = Layers(sum_over_ranks(embed(tokens))), None
    for index in range(num_layers):
        update = sum_over_ranks(layers.attention(index, update))
        update = sum_over_ranks(layers.mlp(index, update))
    return layers.finish(update)

``_pass`` is the same loop as a coroutine: for each sum it yields a ``Collective``, a function that computes the sum, and
is sent the result. So ``forward`` decides when a sum runs: at once, or on a lane while another part of the step is
computed. Passes yield the same number of collectives in the same order on every rank.

``layer_kernels.EagerLayers`` computes any batch kernel by kernel; ``layer_program`` the same for few rows on a CPU, and, where the
ranks sum decode rows over shared memory, all layers with their sums in one call.

Source: Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783.
"""

from collections.abc import Callable, Generator
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Feedback
from tightwire.comm.lane import Lane
from tightwire.kernels.cpu.library import available
from tightwire.kernels.layer_ops import rms_norm
from tightwire.kernels.linear import linear
from tightwire.model.adapters.product import AdapterProducts
from tightwire.model.cache.kv_cache import CacheSource, KeyBiases
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layer_kernels import EagerLayers, Layers, norm_form
from tightwire.model.layer_program import LayerProgram
from tightwire.model.parallel import RowSums, TensorParallel
from tightwire.model.rope import rope_tables
from tightwire.model.step import Batch
from tightwire.model.weights.source import WeightSource

Collective = Callable[[], Tensor]  # all ranks call their collectives in the same order

# The most rows of a step with prompt rows that runs as the layer program. It spares a step of SmolLM2 8 ms; for 256 rows
# kernels called one by one take as long, because they divide the rows among the threads better.
MAX_PROGRAM_ROWS = 128


class Llama:
    """One rank's layers. ``forward`` writes the new tokens' keys and values to the cache."""

    def __init__(
        self,
        config: LlamaConfig,
        parallel: TensorParallel,
        weights: WeightSource,
        cache: CacheSource,
        max_positions: int,
        adapters: AdapterProducts | None = None,
        *,
        has_program: bool = True,
    ) -> None:
        """``has_program``: on a CPU few rows may run as the layer program, which reads no ``JoinedRows``."""
        self._config, self.parallel, self.weights, self.cache = config, parallel, weights, cache
        self.adapters, self.hidden_size = adapters, config.hidden_size
        self.before_TD: Tensor | None = None  # where a later stage's graphs find the hidden states of the stage before
        self._key_biases = KeyBiases(config, parallel.shard, cache, rope_tables(config, max_positions, cache.device))
        on_cpu = cache.device.type == "cpu"
        # Dtype of partial sums and residual. In 16 bits, rounding the residual costs the most accuracy.
        self.residual_dtype = torch.float32 if on_cpu else parallel.sum_dtype or cache.dtype
        # By policy and layer: the sums after attention and after the MLP.
        layers = range(config.first_layer, config.first_layer + config.num_layers)
        self._sums = [
            [[parallel.row_sums(site, layer, policy) for site in ("o_proj", "down_proj")] for layer in layers]
            for policy in range(parallel.num_policies)
        ]
        self._spans = weights.spans
        if cache.layers_at_a_time is not None:
            self._spans = [range(layer, layer + 1) for layer in range(config.num_layers)]
        self._program = None
        # A norm of all heads together needs a sum over the ranks in the midst of attention, which the program does not make.
        self.sums_squares = config.qk_norm == "projection" and parallel.num_ranks > 1
        sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        self._projection_sizes = torch.tensor(sizes, dtype=torch.float32, device=cache.device)
        if has_program and on_cpu and available() and not self.sums_squares:
            self._program = LayerProgram(config, parallel.shard, cache, self._key_biases, adapters)

    @torch.inference_mode()
    def forward(self, *parts: Batch, lane: Lane | None = None) -> Tensor:
        """Compute a step in one or several parts; returns (T, D) hidden states before the final norm.

        Each layer computes all parts before the next layer starts, so its weights are fetched once. A row's bits equal
        those of the unsplit step if its sum does not depend on the other rows in its message. ``lane``: sums one part
        while the next is computed; None: sums and computation do not overlap.
        """
        start = _call if lane is None else lambda collective: lane.start(collective).wait
        has_few_rows = parts[0].phase == "decode" or len(parts[0].token_ids_T) <= MAX_PROGRAM_ROWS
        program = self._program if len(parts) == 1 and has_few_rows else None
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

    def _pass(self, batch: Batch, program: LayerProgram | None) -> Generator[Collective, Tensor, Tensor]:
        """Run one pass over the layers: yield each collective, receive its result, and return (T, D).

        Each norm adds the previous sum to the residual stream, so only the last sum is added here.
        """
        residual_TD = yield partial(self._embed, batch)
        if program is None:
            given = self.cache, self._key_biases, batch, residual_TD, self.adapters
            layers = EagerLayers(self._config, self.parallel.shard, *given)
        else:
            layers = program.begin(residual_TD, batch)
        update_TD: Tensor | None = None
        feedback = Feedback()
        for span in self._spans:
            for index in span:
                layers.place(index, self.weights.layer(index))
            if program is not None and (together := self._together(program, span, batch, update_TD)) is not None:
                update_TD = yield together
            else:
                for index in span:
                    update_TD = yield from self._run_layer(index, layers, batch, update_TD, feedback)
            for index in span:
                self.weights.release(index)
                self.cache.release(index)
        assert update_TD is not None, "a model has at least one layer"
        return layers.finish(update_TD, self.weights.outer.last_update_norm)

    def _run_layer(
        self, index: int, layers: Layers, batch: Batch, update_TD: Tensor | None, feedback: Feedback
    ) -> Generator[Collective, Tensor, Tensor]:
        """Run one layer, and return the update after its MLP."""
        attention_sums, mlp_sums = self._sums[batch.policy][index]
        if self.sums_squares and isinstance(layers, EagerLayers):
            qkv_THE = layers.project(index, update_TD)
            squares_T2 = yield partial(self.parallel.sum_small, layers.square_sums(qkv_THE), "qk_norm", batch.phase)
            partial_TD = layers.attend(index, qkv_THE, squares_T2 / self._projection_sizes)
        else:
            partial_TD = layers.attention(index, update_TD)
        update_TD = yield self._sum(partial_TD, attention_sums, batch, feedback)
        dropped = attention_sums and attention_sums.keep_dropped(update_TD, layers.residual_TD, batch.num_decode_rows)
        partial_TD = layers.mlp(index, update_TD if dropped is None else dropped.update_TD)
        if dropped is not None:
            dropped.restore(layers.residual_TD, partial_TD)
        return (yield self._sum(partial_TD, mlp_sums, batch, feedback))

    def _sum(self, partial_TD: Tensor, sums: RowSums | None, batch: Batch, feedback: Feedback) -> Collective:
        return partial(self.parallel.sum_rows, partial_TD, sums, feedback, num_decode_rows=batch.num_decode_rows)

    def _together(
        self, program: LayerProgram, span: range, batch: Batch, update_TD: Tensor | None
    ) -> Collective | None:
        """Return the call that runs these layers and their sums in one kernel; None if it cannot make the sums."""
        known = [sums for layer in self._sums[batch.policy][span.start : span.stop] for sums in layer if sums]
        if not known:
            return partial(program.run_layers, span, update_TD)
        if batch.phase != "decode":
            return None
        kernel_sums = self.parallel.sums_in_kernel({row_sums.decode for row_sums in known}, program.residual_TD)
        if kernel_sums is None:
            return None
        return partial(program.run_and_sum, span, update_TD, kernel_sums, [row_sums.label for row_sums in known])

    def _embed(self, batch: Batch) -> Tensor:
        residual_TD, scale = batch.hidden_TD, self._config.embedding_scale
        if residual_TD is None and self.before_TD is not None:
            residual_TD = self.before_TD[: len(batch.token_ids_T)]
        if residual_TD is None:
            given = self.weights.outer.embedding, batch.token_ids_T, batch.policy, batch.phase
            residual_TD = self.parallel.embed(*given, self.residual_dtype)
        if scale == 1.0 or self._config.first_layer:
            return residual_TD
        # Rounded to the weights' dtype, as in the models' own code.
        return residual_TD.mul_(torch.tensor(scale, dtype=self.cache.dtype).item())

    @torch.inference_mode()
    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return this rank's columns, (R, local_V) float32."""
        outer, config = self.weights.outer, self._config
        normed_RD = rms_norm(hidden_RD, outer.final_norm, norm_form(config))
        local_RV = linear(normed_RD, outer.head, out_dtype=torch.float32)
        if config.logits_divisor != 1.0:
            local_RV.div_(config.logits_divisor)
        if config.logits_cap:
            local_RV.div_(config.logits_cap).tanh_().mul_(config.logits_cap)
        return local_RV


def _call(collective: Collective) -> Callable[[], Tensor]:
    result = collective()
    return lambda: result
