"""Prompts in stages (``--layout hybrid``): one rank's part of the chunks that pass from stage to stage.

In each step a chunk of prompt rows enters the first stage, and every chunk under way passes one stage: in step t the ranks of
stage s compute its layers for the chunk of step t - s; several sum their parts in memory. The first sends the hidden states to
the first rank of the next stage, and each sends every other rank the keys and values that this one decodes with. Messages
travel beside the computing of later steps. Keys and values have connections of their own, so that hidden states, for which a
stage waits, never follow them; only the first decode row of a prompt waits for its last ones.

For its stage a rank has a cache of the KV heads that it computes there, all if it is alone, with the block numbers of the ordinary
cache, which has the rank's own heads of all layers and which decode rows read.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.kernels.spec.int8_heads import parts_of
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.decoder import Llama
from tightwire.model.layout import Layout
from tightwire.model.parallel import BOUNDARY, SideWire, StageWire, TensorParallel
from tightwire.model.stages import MAX_LATE_STEPS, StagePlan
from tightwire.model.step import Batch, StepArrays, StepPlan, ints, phase_of
from tightwire.model.weights.stage import embed_whole

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


class _HandOver(NamedTuple):
    """Keys and values that all ranks send each other after one step."""

    chunks: list[tuple[int, Chunk]]  # every rank with its chunk, in order
    oldest: int  # step in which one of them entered
    pending: Pending


class Passage:
    """The chunks under way, and the hidden states that they take along. In every step all ranks call ``advance`` and ``send_on``."""

    def __init__(
        self,
        plan: StagePlan,
        stage: int,
        hidden_size: int,
        wire: StageWire | None,
        beside: SideWire | None,
        parallel: TensorParallel,
    ) -> None:
        """``wire``: on the first rank of each stage, as ``beside`` in a pipeline. ``parallel``: the ranks of this rank's stage."""
        self.plan, self.stage, self.wire, self.beside, self.parallel = plan, stage, wire, beside, parallel
        self._last, self._hidden_size = plan.num_stages - 1, hidden_size
        self.is_last = stage == self._last
        self.chunks: deque[Chunk | None] = deque([None] * plan.num_stages, plan.num_stages)  # by stage
        self._moving: deque[Pending] = deque(maxlen=2)  # the last messages

    def close(self) -> None:
        for wire in (self.wire, self.beside):
            if wire is not None:
                wire.close()

    def advance(self, entering: Chunk | None) -> Chunk | None:
        """Let every chunk move to the next stage; return the one that is in this rank's stage now."""
        self.chunks.appendleft(entering)
        return self.chunks[self.stage]

    def arrived(self) -> Tensor | None:
        """Wait for the hidden states of this stage's chunk, (T, D) float32, on a GPU the residual; None in the first stage.

        That waits for its message before the last instead, so that it does not run ahead of a slow wire. Further ranks of a
        stage get the rows from its first rank, in a collective.
        """
        if self.stage == 0:
            if len(self._moving) > 1:
                self._moving[0].wait()
            return None
        return self.shared(None if self.wire is None else self._moving[-1].wait(), BOUNDARY)

    def shared(self, rows_TD: Tensor | None, site: str) -> Tensor:
        """Return on every rank of the stage its chunk's (T, D) float32, which the first has."""
        chunk = self.chunks[self.stage]
        assert chunk is not None, "asked only for a chunk"
        return self.parallel.share_rows(rows_TD, (chunk.num_rows, self._hidden_size), 0, chunk.phase, site)

    def send_on(self, hidden_TD: Tensor | None) -> None:
        """Start to send this stage's hidden states, and to receive those of the chunk that it computes in the next step."""
        chunks = list(self.chunks)
        if self.wire is not None and (moving := [each for each in chunks[: self._last] if each is not None]):
            coming = chunks[self.stage - 1] if self.stage else None
            shape = None if coming is None else (coming.num_rows, self._hidden_size)
            phase = (chunks[self.stage] or coming or moving[0]).phase
            self._moving.append(self.wire.send_on(None if self.is_last else hidden_TD, shape, phase))


class PromptStages:
    """The chunks under way, and this rank's stage. Call ``begin``, before decode rows are computed, and ``run`` in each step."""

    def __init__(
        self, passage: Passage, layout: Layout, parts: Layout, model: Llama, others: Matrix | None, cache: CacheSource
    ) -> None:
        """``parts``: each rank's in the layers of its stage; ``model`` has this one's. Its cache has one block more, for rows nobody reads.

        ``others``: rows of the embedding, on rank 0. ``cache``: the ordinary cache, of this rank's KV heads in all layers.
        """
        assert passage.beside is not None, "each rank hands keys and values over"
        self.passage, self._plan, self.wire, self.beside = passage, passage.plan, passage.wire, passage.beside
        self._model, self._other_rows, self._heads = model, others, moved_heads(layout, parts)
        self._rank = rank = passage.beside.group.rank
        # Of the KV heads that this rank decodes with, and of those that it computes in its stage.
        self._own_start, self._start = (each.shards[rank].kv_heads.start for each in (layout, parts))
        self._decode_cache, self._cache = cache, model.cache
        self._under_way, self.is_last, self.close = passage.chunks, passage.is_last, passage.close
        self._hand_overs: deque[_HandOver] = deque()  # oldest first
        keys_NKPE, _ = cache.layer(0)
        self._head_bytes = keys_NKPE.shape[-1] * keys_NKPE.itemsize  # of a token

    def begin(self, plan: StepPlan, entering: StepArrays | None) -> None:
        """Begin a step: every chunk moves to the next stage. ``entering``: the prompt rows of this step.

        Writes arrived keys and values to the ordinary cache, and waits for those that this step's decode rows need.
        """
        if len(rewritten := ints(plan.rewritten)):
            self._abandon(rewritten)
        self.passage.advance(None if entering is None else Chunk(plan.index, 0, entering))
        needed, waiting = max(plan.awaits, plan.index - MAX_LATE_STEPS), self._hand_overs
        while waiting and (waiting[0].pending.done.done() or waiting[0].oldest <= needed):
            self._store(waiting.popleft())

    @torch.inference_mode()
    def run(self, to_batch: Callable[[StepArrays], Batch]) -> Tensor | None:
        """Compute this stage's chunk; return (T, D) hidden states of the chunk that leaves the last stage, on its ranks."""
        passage, before_TD, hidden_TD = self.passage, None, None
        if (chunk := self._under_way[passage.stage]) is not None:
            batch = to_batch(chunk.arrays)
            if self._other_rows is not None:
                before_TD = embed_whole(batch.token_ids_T, self._model.weights.outer.embedding, self._other_rows)
            before_TD = passage.arrived() if passage.stage else passage.shared(before_TD, "embed")
            hidden_TD = self._model.forward(replace(batch, hidden_TD=before_TD))
        passage.send_on(hidden_TD)
        if any(self._under_way):
            self._hand_overs.append(self._hand_over(chunk))
        return hidden_TD if self.is_last else None

    def _hand_over(self, chunk: Chunk | None) -> _HandOver:
        """Start to send copies of the keys and values of ``chunk`` that this rank has computed for the other ranks."""
        num_ranks, own = len(self._heads), self._rank
        parts, sizes = [torch.empty(0, dtype=torch.uint8)] * num_ranks, [0] * num_ranks
        if chunk is not None:
            layers = [self._cache.layer(layer) for layer in range(len(self._plan.of(self.passage.stage)))]
            rows_LCTKE = take_rows(layers, torch.from_numpy(chunk.slots_T))
            for rank, heads in enumerate(self._heads[own]):
                part = rows_LCTKE[:, :, :, heads.start - self._start : heads.stop - self._start].contiguous()
                if rank == own:
                    self._write(chunk, own, part)
                else:
                    parts[rank] = part.view(-1).view(torch.uint8)
        passing = [(stage, each) for stage, each in enumerate(self._under_way) if each is not None]
        chunks = [(rank, each) for stage, each in passing for rank in self._plan.ranks_of(stage)]
        for rank, each in chunks:
            sizes[rank] = 0 if rank == own else math.prod(self._shape_from(rank, each)) * self._head_bytes
        return _HandOver(chunks, min(each.step for _, each in chunks), self.beside.hand_over(parts, sizes))

    def _shape_from(self, rank: int, chunk: Chunk) -> tuple[int, int, int, int]:
        """Return (L, 2, T, K): what ``rank`` sends this one of a chunk."""
        num_layers = len(self._plan.of(self._plan.stage_of(rank)))
        return num_layers, 2, chunk.num_rows, len(self._heads[rank][self._rank])

    def _store(self, arrived: _HandOver) -> None:
        data, start = arrived.pending.wait(), 0
        for rank, chunk in arrived.chunks:
            shape = self._shape_from(rank, chunk)
            if rank != self._rank and shape[-1]:
                stop = start + math.prod(shape) * self._head_bytes
                self._write(chunk, rank, data[start:stop].view(self._cache.kv_dtype).view(*shape, -1))
                start = stop

    def _write(self, chunk: Chunk, rank: int, rows_LCTKE: Tensor) -> None:
        """Write the KV heads of a chunk that ``rank`` has computed for this one to the ordinary cache."""
        slots, heads = chunk.slots_T, self._heads[rank][self._rank]
        written = slots < self._decode_cache.num_blocks * self._decode_cache.block_size
        places = slice(heads.start - self._own_start, heads.stop - self._own_start)
        layers = [self._decode_cache.layer(layer) for layer in self._plan.of(self._plan.stage_of(rank))]
        layers = [(keys_NKPE[:, places], values_NKPE[:, places]) for keys_NKPE, values_NKPE in layers]
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


def moved_heads(layout: Layout, parts: Layout) -> list[list[range]]:
    """Return the KV heads that each rank hands to each other; of several that have a head in a stage the first hands it over."""
    found, done = list[list[range]](), 0
    for part in parts.shards:
        first, done = max(part.kv_heads.start, done if part.rank else 0), part.kv_heads.stop
        spans = [(max(first, shard.kv_heads.start), min(done, shard.kv_heads.stop)) for shard in layout.shards]
        found.append([range(start, max(start, stop)) for start, stop in spans])
    return found


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
