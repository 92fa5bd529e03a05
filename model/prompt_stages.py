"""Prompts in stages (``--layout hybrid``): one rank's part of the chunks that pass from stage to stage.

In each step a chunk of prompt rows enters the first stage, and every chunk under way passes one stage: in step t rank s
computes the whole layers of its stage for the chunk of step t - s. It sends the hidden states to the next rank, and to each
other rank the keys and values that this one decodes with. Messages travel beside the computing of later steps. Keys and
values have connections of their own, so that hidden states, for which a stage waits, never follow them; only the first
decode row of a prompt waits for its last ones.

A rank's stage has a cache of all KV heads of its layers, with the block numbers of the ordinary cache, which has the
rank's own heads of all layers and which decode rows read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.kernels.spec.int8_heads import head_bytes, parts_of
from tightwire.model.cache.kv_cache import CacheSource, KVCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.decoder import Llama
from tightwire.model.layout import Layout, make_layout, stage_model, whole_shard
from tightwire.model.parallel import BOUNDARY, StageWire, TensorParallel
from tightwire.model.stages import MAX_LATE_STEPS, StagePlan
from tightwire.model.step import Batch, StepArrays, StepPlan, ints, phase_of
from tightwire.model.weights.stage import StageWeights

KeysAndValues = tuple[Tensor, Tensor]  # of one layer, (N, K, P, E) each


@dataclass(slots=True, eq=False)
class Chunk:
    """The rows of one step on their way through the stages."""

    step: int
    policy: int
    arrays: StepArrays  # rows that must not be written any more have slots in the cache's last block

    @property
    def num_rows(self) -> int:
        return len(self.arrays.token_ids_T)

    @property
    def phase(self) -> str:
        return phase_of(self.arrays.num_decode_rows, self.num_rows)

    @property
    def slots_T(self) -> np.ndarray:
        return self.arrays.slots_LT[0]  # all layers are one group


@dataclass(slots=True, eq=False)
class _HandOver:
    """Keys and values that all ranks send each other after one step."""

    chunks: list[tuple[int, Chunk]]  # every rank with its chunk, in order
    pending: Pending

    def serves(self, step: int) -> bool:
        """True if a chunk of ``step`` or before is in it."""
        return any(chunk.step <= step for _, chunk in self.chunks)


class Passage:
    """The chunks under way, and the hidden states that they take along. In every step all ranks call ``advance`` and ``send_on``."""

    def __init__(
        self, plan: StagePlan, stage: int, hidden_size: int, wire: StageWire | None, parallel: TensorParallel
    ) -> None:
        """``wire``: on the first rank of each stage. ``parallel``: the ranks of this rank's stage."""
        self.wire, self.stage, self._last, self._parallel = wire, stage, plan.num_stages - 1, parallel
        self.is_last, self._hidden_size = stage == self._last, hidden_size
        self.chunks: deque[Chunk | None] = deque([None] * plan.num_stages, plan.num_stages)  # by stage
        self._moving: deque[Pending] = deque(maxlen=2)  # the last messages

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()

    def advance(self, entering: Chunk | None) -> Chunk | None:
        """Let every chunk move to the next stage; return the one that is in this rank's stage now."""
        self.chunks.appendleft(entering)
        return self.chunks[self.stage]

    def arrived(self) -> Tensor | None:
        """Wait for the hidden states of this stage's chunk, (T, D) float32; None in the first stage.

        That waits for its message before the last instead, so that it does not run ahead of a slow wire. Further ranks of a
        stage get the rows from its first rank, in a collective.
        """
        rows_TD, chunk = None, self.chunks[self.stage]
        if self.stage == 0:
            if len(self._moving) > 1:
                self._moving[0].wait()
            return None
        if self.wire is not None:
            rows_TD = self._moving[-1].wait()
        assert chunk is not None, "asked only for a chunk"
        return self._parallel.share_rows(rows_TD, (chunk.num_rows, self._hidden_size), 0, chunk.phase, BOUNDARY)

    def send_on(self, hidden_TD: Tensor | None) -> None:
        """Start to send this stage's hidden states, and to receive those of the chunk that it computes in the next step."""
        chunks = list(self.chunks)
        if self.wire is not None and (moving := [each for each in chunks[: self._last] if each is not None]):
            coming = chunks[self.stage - 1] if self.stage else None
            shape = None if coming is None else (coming.num_rows, self._hidden_size)
            phase = (chunks[self.stage] or coming or moving[0]).phase
            self._moving.append(self.wire.send_on(None if self.is_last else hidden_TD, shape, phase))

    def send_chosen(self, results: Tensor | None, num: int, phase: str) -> Pending | None:
        """Send the last stage's ``results`` to rank 0; None on ranks without a wire. See ``StageWire.send_chosen``."""
        return None if self.wire is None else self.wire.send_chosen(results, num, phase)


class PromptStages:
    """The chunks under way, and this rank's stage. Call ``begin``, before decode rows are computed, and ``run`` in each step."""

    def __init__(
        self,
        config: LlamaConfig,
        layout: Layout,
        plan: StagePlan,
        wire: StageWire,
        weights: StageWeights,
        cache: CacheSource,
        max_positions: int,
    ) -> None:
        """``cache``: the ordinary cache, of this rank's KV heads in all layers."""
        self._config, self._plan, self._weights = config, plan, weights
        alone = TensorParallel(replace(wire.group, rank=0, world_size=1), make_layout(config, 1), None)
        self.wire, self._passage = wire, Passage(plan, wire.group.rank, config.hidden_size, wire, alone)
        self.is_last = self._passage.is_last
        self._rank, self.layers = wire.group.rank, plan.of(wire.group.rank)
        self._heads = [shard.kv_heads for shard in layout.shards]
        self._decode_cache, own = cache, stage_model(config, self.layers)
        self._cache = KVCache(
            own,
            whole_shard(config),
            num_blocks=cache.num_blocks + 1,  # the last block takes the rows that nobody reads
            block_size=cache.block_size,
            dtype=cache.dtype,
            kv_dtype=cache.kv_dtype,
            device=cache.device,
        )
        self._model = Llama(own, alone, weights, self._cache, max_positions)
        self._under_way = self._passage.chunks
        self._hand_overs: deque[_HandOver] = deque()  # oldest first
        self._head_bytes = head_bytes(config.head_dim, cache.kv_dtype)  # of a token

    def close(self) -> None:
        self.wire.close()

    def begin(self, plan: StepPlan, entering: StepArrays | None) -> None:
        """Begin a step: every chunk moves to the next stage. ``entering``: the prompt rows of this step.

        Writes arrived keys and values to the ordinary cache, and waits for those that this step's decode rows need.
        """
        if len(rewritten := ints(plan.rewritten)):
            self._abandon(rewritten)
        self._passage.advance(None if entering is None else Chunk(plan.index, 0, entering))
        needed = max(plan.awaits, plan.index - MAX_LATE_STEPS)
        while self._hand_overs and ((oldest := self._hand_overs[0]).pending.done.done() or oldest.serves(needed)):
            self._store(self._hand_overs.popleft())

    @torch.inference_mode()
    def run(self, to_batch: Callable[[StepArrays], Batch]) -> Tensor | None:
        """Compute this rank's chunk; return (T, D) hidden states of the chunk that leaves the last stage, on its rank."""
        chunk, hidden_TD = self._under_way[self._rank], None
        if chunk is not None:
            batch, before_TD = to_batch(chunk.arrays), self._passage.arrived() if self._rank else None
            before_TD = self._weights.embed(batch.token_ids_T) if before_TD is None else before_TD
            hidden_TD = self._model.forward(replace(batch, hidden_TD=before_TD))
        self._passage.send_on(hidden_TD)
        if any(self._under_way):
            self._hand_overs.append(self._hand_over(chunk))
        return hidden_TD if self.is_last else None

    def _hand_over(self, chunk: Chunk | None) -> _HandOver:
        """Start to send copies of the keys and values of ``chunk`` that this stage has computed for the other ranks."""
        num_stages, own = self._plan.num_stages, self._rank
        parts, sizes = [torch.empty(0, dtype=torch.uint8)] * num_stages, [0] * num_stages
        if chunk is not None:
            layers = [self._cache.layer(layer) for layer in range(len(self.layers))]
            rows_LCTKE = take_rows(layers, torch.from_numpy(chunk.slots_T))
            for rank, heads in enumerate(self._heads):
                part = rows_LCTKE[:, :, :, heads.start : heads.stop].contiguous()
                if rank == own:
                    self._write(chunk, own, part)
                else:
                    parts[rank] = part.view(-1).view(torch.uint8)
        chunks = [(rank, each) for rank, each in enumerate(self._under_way) if each is not None]
        for rank, each in chunks:
            sizes[rank] = 0 if rank == own else self._bytes_from(rank, each)
        return _HandOver(chunks, self.wire.hand_over(parts, sizes))

    def _bytes_from(self, rank: int, chunk: Chunk) -> int:
        """Return the bytes of this rank's KV heads of a chunk in the layers of stage ``rank``."""
        num_heads = 2 * len(self._plan.of(rank)) * len(self._heads[self._rank])
        return num_heads * chunk.num_rows * self._head_bytes

    def _store(self, arrived: _HandOver) -> None:
        data, start = arrived.pending.wait(), 0
        for rank, chunk in arrived.chunks:
            if rank != self._rank:
                stop = start + self._bytes_from(rank, chunk)
                shape = len(self._plan.of(rank)), 2, chunk.num_rows, len(self._heads[self._rank]), -1
                self._write(chunk, rank, data[start:stop].view(self._cache.kv_dtype).view(shape))
                start = stop

    def _write(self, chunk: Chunk, stage: int, rows_LCTKE: Tensor) -> None:
        """Write this rank's KV heads of a chunk in the layers of ``stage`` to the ordinary cache."""
        slots = chunk.slots_T
        written = slots < self._decode_cache.num_blocks * self._decode_cache.block_size
        layers = [self._decode_cache.layer(layer) for layer in self._plan.of(stage)]
        if not written.all():
            rows_LCTKE = rows_LCTKE[:, :, torch.from_numpy(written)]
        put_rows(layers, torch.from_numpy(slots[written]), rows_LCTKE)

    def _abandon(self, blocks: np.ndarray) -> None:
        """Let no chunk under way write to these blocks any more: its sequence has ended, and others have them."""
        arriving = [chunk for hand_over in self._hand_overs for _, chunk in hand_over.chunks]
        for chunk in {each for each in (*self._under_way, *arriving) if each is not None}:
            size, slots = self._cache.block_size, chunk.slots_T
            nowhere = self._decode_cache.num_blocks * size
            changed = np.where(np.isin(slots // size, blocks), np.int32(nowhere), slots)
            chunk.arrays = replace(chunk.arrays, slots_LT=changed[None])


def take_rows(layers: Sequence[KeysAndValues], slots_T: Tensor) -> Tensor:
    """Return (L, 2, T, K, E): the keys and values of ``layers`` in these slots, of all heads; in int8 E + 2, with the scale."""
    place = _place(layers, slots_T)
    rows = [torch.cat([part[place] for part in _by_token(each)], -1) for each in chain(*layers)]
    return torch.stack(rows).unflatten(0, (-1, 2))


def put_rows(layers: Sequence[KeysAndValues], slots_T: Tensor, rows_LCTKE: Tensor) -> None:
    """Write (L, 2, T, K, E), of the heads that ``layers`` have, to these slots."""
    place = _place(layers, slots_T)
    for each, rows_TKE in zip(chain(*layers), rows_LCTKE.flatten(0, 1), strict=True):
        parts = _by_token(each)
        for part, numbers in zip(parts, rows_TKE.split([part.shape[-1] for part in parts], -1), strict=True):
            part[place] = numbers


def _by_token(cache: Tensor) -> Sequence[Tensor]:
    """Return views of a cache, (N, K, P, ...), in which the numbers of a token are together."""
    if cache.dtype != torch.int8:
        return (cache,)
    codes, scales = parts_of(cache)
    return codes, scales[..., None].view(torch.int8)


def _place(layers: Sequence[KeysAndValues], slots_T: Tensor) -> tuple[Tensor, slice, Tensor]:
    slots_T, block_size = slots_T.long(), layers[0][0].shape[2]
    return slots_T // block_size, slice(None), slots_T % block_size
