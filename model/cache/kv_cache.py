"""The paged KV cache of one rank, on the device or on the host: blocks of P tokens, addressed through block tables."""

import queue
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tightwire.buffers import BufferPool, LayerSource, PoolBuffer, SharedUses, make_stream, page_aligned
from tightwire.kernels.row_runs import copy_runs
from tightwire.kernels.spec.attention import KeyBias
from tightwire.kernels.spec.int8_heads import cache_width, head_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import CacheError
from tightwire.model.layer_groups import LayerGroups
from tightwire.model.layout import Shard
from tightwire.model.rope import Angles
from tightwire.model.step import StepArrays


class CacheSource(LayerSource):
    """Provides each layer's keys and values to the passes of every step."""

    groups: LayerGroups  # each has a block table
    num_blocks: int  # that the tables returned by ``begin`` can refer to
    block_size: int
    block_stride_bytes: int  # between consecutive blocks, in keys and in values, the same in every layer
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype  # of keys and values; int8 has scales (``kernels.spec.int8_heads``)
    device: torch.device
    layers_at_a_time: int | None = None  # that a pass may hold; None: all

    def begin(self, step: StepArrays) -> StepArrays:
        """Prepare the next step and return it with block numbers that index the results of ``layer``."""
        return step

    @abstractmethod
    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (N, local_K, P, E), in int8 (N, local_K, P, E + 2); raises CacheError if they do not arrive in time."""


def layer_block_bytes(config: LlamaConfig, shard: Shard, block_size: int, kv_dtype: torch.dtype) -> int:
    """Return the bytes of a block's keys and values in one layer."""
    return 2 * shard.local_kv_heads * block_size * head_bytes(config.head_dim, kv_dtype)


class KVCache(CacheSource):
    """``CacheSource`` with all layers on the device.

    A block holds the same tokens in every layer of a group and on every rank. Attention kernels read one block of one head as a
    unit, so the layout (N, K, P, E) keeps it contiguous.
    """

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
        groups: LayerGroups | None = None,
    ) -> None:
        """Allocate the cache, by default in ``dtype`` and for one group. A CPU's pages take no memory before they are first written."""
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        self.kv_dtype, self.groups = kv_dtype or dtype, groups or LayerGroups.of(config, bounded=False)
        width = cache_width(config.head_dim, self.kv_dtype)
        shape = (self.groups.num_layers, num_blocks, shard.local_kv_heads, block_size, width)
        keys, values = (torch.empty(shape, dtype=self.kv_dtype, device=device) for _ in range(2))
        self.block_stride_bytes = keys.stride(1) * keys.itemsize
        layers = tuple(zip(keys.unbind(), values.unbind(), strict=True))
        self._layers = tuple(layers[number] for _, number in self.groups.places)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._layers[index]


NUM_BUFFERS = 2


class CacheFlow(NamedTuple):
    """Bytes moved since the start, and the time that passes waited for layers."""

    num_bytes: int  # in both directions
    waited_s: float  # with CUDA only the host's waits


class OffloadedCache(CacheSource):
    """``CacheSource`` with all layers on the host, in pinned memory with CUDA. All are one group: windows only mask.

    Each of two device buffers has room for one layer's blocks of one step. While layer i is computed, a thread fetches
    the blocks of layer i + 1. Before it fills layer i's buffer for layer i + 2, it saves the blocks of layer i that got
    new tokens. Only blocks of the step's sequences are moved, each once. During the step a block's number is its place
    in the buffer. ``bench.stream.order`` checks the order in a trace. Source: FlexGen, arXiv 2303.06865.

    The layout of a layer is (N, 2, K, P, E) on both sides, so a block's keys and values move together.

    Cost: the cache on the host; ``NUM_BUFFERS`` layers of ``buffer_blocks`` blocks on the device. Every step waits for
    its first layer, and for other layers when the transfer takes longer than the computation.
    """

    layers_at_a_time = 1

    def __init__(
        self,
        config: LlamaConfig,
        shard: Shard,
        *,
        num_blocks: int,
        buffer_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """``buffer_blocks``: the most that one step may need. ``timeout_s``: longest wait for a layer without a byte."""
        self.num_blocks, self.block_size, self.dtype, self.device = buffer_blocks, block_size, dtype, device
        self.groups = LayerGroups.of(config, bounded=False)
        self.kv_dtype = stored = kv_dtype or dtype
        block_shape = (2, shard.local_kv_heads, block_size, cache_width(config.head_dim, stored))
        self.block_stride_bytes = block_bytes = layer_block_bytes(config, shard, block_size, stored)
        self._block_bytes, self._timeout_s, self._num_layers = block_bytes, timeout_s, config.num_layers
        host_bytes, pinned = config.num_layers * num_blocks * block_bytes, device.type == "cuda"
        memory = page_aligned(host_bytes, torch.device("cpu"), pinned=pinned)
        self._host = memory.view(stored).view(config.num_layers, num_blocks, *block_shape)
        self.pool = BufferPool(NUM_BUFFERS, buffer_blocks * block_bytes, device, saves=True, traced=True)
        self._blocks = [buffer.memory.view(stored).view(buffer_blocks, *block_shape) for buffer in self.pool.buffers]
        self._keys_and_values = [(blocks[:, 0], blocks[:, 1]) for blocks in self._blocks]
        self._uses = SharedUses(self.pool, self._take)
        self._num_bytes, self._waited_s = 0, 0.0
        # Of each step: the runs of blocks that it fetches, and that it saves, in every layer (``runs_of``).
        self._steps: queue.SimpleQueue[tuple[Tensor, Tensor] | None] = queue.SimpleQueue()
        self._thread = self.pool.thread("tightwire-kv-cache", self._move, make_stream(device))
        self._thread.start()

    def begin(self, step: StepArrays) -> StepArrays:
        """Start to fetch; return the step with buffer places as block numbers. ValueError: it needs too many blocks."""
        renamed, (blocks_N, read_I, written_J) = gather_blocks(step, self.block_size)
        if len(blocks_N) > self.num_blocks:
            raise ValueError(f"a step needs {len(blocks_N)} cache blocks, but only {self.num_blocks} fit on the device")
        fetch, save = runs_of(blocks_N[read_I], read_I), runs_of(written_J, blocks_N[written_J])
        self._steps.put((torch.from_numpy(fetch), torch.from_numpy(save)))
        return renamed

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._keys_and_values[self._uses.use(index).number]

    def release(self, index: int) -> None:
        self._uses.release(index)

    def flow(self) -> CacheFlow:
        return CacheFlow(self._num_bytes, self._waited_s)

    def close(self) -> None:
        self.pool.close(CacheError("this cache is closed"))
        self._steps.put(None)
        self._thread.join()

    def _take(self, index: int) -> PoolBuffer:
        start_s = time.perf_counter()
        try:
            buffer = self.pool.use(index, self._timeout_s)
        except TimeoutError as error:
            raise CacheError(f"keys and values of layer {index} did not arrive from the host: {error}") from None
        self._waited_s += time.perf_counter() - start_s
        return buffer

    def _move(self) -> None:
        for fetch, save in iter(self._steps.get, None):
            for layer in range(self._num_layers + NUM_BUFFERS):
                if layer >= NUM_BUFFERS:
                    self._save(layer - NUM_BUFFERS, save)
                if layer < self._num_layers:
                    buffer = self.pool.fill(layer)
                    self._copy(self._blocks[buffer.number], self._host[layer], fetch)
                    self.pool.filled(layer)

    def _save(self, layer: int, runs_R3: Tensor) -> None:
        buffer = self.pool.save(layer)
        self._copy(self._host[layer], self._blocks[buffer.number], runs_R3)
        self.pool.saved(layer)

    def _copy(self, target: Tensor, source: Tensor, runs_R3: Tensor) -> None:
        copy_runs(target, source, runs_R3)
        self._num_bytes += int(runs_R3[:, 2].sum()) * self._block_bytes
        self.pool.moved()


class StepBlocks(NamedTuple):
    """The blocks that a step reads or writes, without duplicates. A block's place is its index in ``blocks_N``."""

    blocks_N: np.ndarray  # int32, ascending: the block at each place
    read_I: np.ndarray  # ascending places with tokens of earlier steps
    written_J: np.ndarray  # ascending places that receive new tokens


def gather_blocks(step: StepArrays, block_size: int) -> tuple[StepArrays, StepBlocks]:
    """Return the step with places instead of block numbers, and the step's blocks. Unused table entries become 0."""
    tables_BM = step.block_tables_LBM[0]  # of the one group
    query_lens_B = np.diff(step.query_start_B1)
    needed_BM = _first_blocks(step.context_lens_B, tables_BM, block_size)
    blocks_N, places_U = np.unique(tables_BM[needed_BM], return_inverse=True)
    places_BM = np.zeros_like(tables_BM)
    places_BM[needed_BM] = places_U
    read_BM = _first_blocks(step.context_lens_B - query_lens_B, tables_BM, block_size)
    block_T, offset_T = np.divmod(step.slots_LT[0], block_size)
    place_T = np.searchsorted(blocks_N, block_T).astype(np.int32)
    blocks = StepBlocks(blocks_N, np.unique(places_BM[read_BM]), np.unique(place_T))
    return replace(step, slots_LT=(place_T * block_size + offset_T)[None], block_tables_LBM=places_BM[None]), blocks


def runs_of(sources_I: np.ndarray, targets_I: np.ndarray) -> np.ndarray:
    """Return (R, 3) int64 runs: first source, first target, count. Within a run both ascending inputs go up by one."""
    starts = np.flatnonzero((np.diff(sources_I, prepend=-2) != 1) | (np.diff(targets_I, prepend=-2) != 1))
    counts = np.diff(starts, append=len(sources_I))
    return np.stack((sources_I[starts], targets_I[starts], counts), axis=1).astype(np.int64)


def _first_blocks(num_tokens_B: np.ndarray, tables_BM: np.ndarray, block_size: int) -> np.ndarray:
    """Return (B, M) bool: the table entries that hold each sequence's first ``num_tokens_B`` tokens."""
    return np.arange(tables_BM.shape[1]) < -(-num_tokens_B // block_size)[:, None]


class KeyBiases:
    """Splits the bias of each layer's queries, keys and values: beside a cache in 8 bits keys are cached without theirs.

    Qwen2.5's biases reach 145 in one channel, where the rest of a key is about 1: rounded together, a code's step would be as large
    as the other channels. Rotation is linear, so attention adds the rotated bias, exactly, when it reads keys.
    """

    def __init__(self, config: LlamaConfig, shard: Shard, cache: CacheSource, angles: Sequence[Angles]) -> None:
        """``angles``: each layer's rotary tables."""
        # A norm of the keys comes after the bias, and is not linear.
        self._apart = cache.kv_dtype == torch.int8 and config.qk_norm == "none"
        self._rows = slice(shard.local_heads, shard.local_heads + shard.local_kv_heads)
        self._head_dim, self.angles = config.head_dim, angles
        self._split: dict[int, tuple[Tensor, KeyBias]] = {}

    def split(self, index: int, qkv_bias: Tensor | None) -> tuple[Tensor | None, KeyBias | None]:
        """Return layer ``index``'s bias without that of keys, and that of keys; computed once, as weights never change."""
        if qkv_bias is None or not self._apart:
            return qkv_bias, None
        if index not in self._split:
            rest = qkv_bias.clone()
            keys_KE = rest.view(-1, self._head_dim)[self._rows]
            key_bias = KeyBias(keys_KE.to(torch.float32, copy=True), *self.angles[index])
            keys_KE.zero_()
            self._split[index] = rest, key_bias
        return self._split[index]
