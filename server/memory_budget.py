"""Whether the model fits, and how much KV cache that leaves: sums made before anything is loaded.

On a CPU all ranks share the host's memory; with CUDA each rank has a device of its own. The cache has the same number
of blocks on every rank, so the tightest pool decides.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tightwire.model.config import LlamaConfig
from tightwire.model.layout import Layout, Shard
from tightwire.model.weights.formats import WeightFormats, weight_bytes
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan, WeightSizes
from tightwire.server.config import EngineOptions
from tightwire.server.limits import MAX_SCORED_ROWS
from tightwire.server.sizes import format_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# What a process holds before it has any tensor: the interpreter, torch, numba; with CUDA its context and cuBLAS.
_RUNTIME_BYTES = {"cpu": 300 << 20, "cuda": 1 << 30}
# Nothing else wants the free memory of a device; on a host other programs and the page cache do.
_CACHE_SHARE = {"cpu": 0.4, "cuda": 0.9}
# Of what is free, the part worth recommending: a host's free memory moves, and the HTTP process takes some itself.
_RECOMMENDED_SHARE = {"cpu": 0.8, "cuda": 0.95}

# Tokens of context worth having: with less, streaming a few layers is worth more than keeping them.
LEAST_CONTEXT = 2048


class NotEnoughMemoryError(ValueError):
    """It does not fit; the message holds the budget as a table and what would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Memory that some ranks share."""

    name: str
    available_bytes: int
    ranks: range


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """What one rank needs; the cache per block."""

    weights: int
    activations: int
    runtime: int
    block: int

    @property
    def fixed(self) -> int:
        return self.weights + self.activations + self.runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Sizes of the cache and of everything beside it."""

    ranks: tuple[RankBytes, ...]
    pools: tuple[Pool, ...]
    num_blocks: int
    max_model_len: int
    max_positions: int  # the context that the model or the user would have

    def table(self) -> str:
        """One line per rank and one per pool, for people."""
        rows: list[tuple[str, ...]] = [("rank", "weights", "KV cache", "activations", "runtime", "total")]
        for number, rank in enumerate(self.ranks):
            cache = rank.block * self.num_blocks
            sizes = (rank.weights, cache, rank.activations, rank.runtime, rank.fixed + cache)
            rows.append((str(number), *map(format_bytes, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        for pool in self.pools:
            need = sum(self.ranks[r].fixed + self.ranks[r].block * self.num_blocks for r in pool.ranks)
            lines.append(f"{pool.name}: {format_bytes(need)} of {format_bytes(pool.available_bytes)} available")
        if 0 < self.max_model_len < self.max_positions:
            lines.append(f"context: {self.max_model_len} of {self.max_positions} tokens, all that the KV cache holds")
        return "\n".join(lines)


def make_budget(
    config: LlamaConfig,
    layout: Layout,
    options: EngineOptions,
    *,
    dtype: str,
    formats: WeightFormats,
    device: str,
    pools: Sequence[Pool],
    plan: WeightPlan = EVERYTHING_RESIDENT,
    cache_share: float | None = None,
) -> MemoryBudget:
    """Decide the number of cache blocks and the longest sequence.

    Args:
        dtype: of what is not packed; ``formats`` says which weights are.
        plan: which layers are streamed.
        cache_share: of what the rest leaves, the part that the cache may have at most; default: the device's.
    Raises:
        NotEnoughMemoryError: weights, cache or the longest sequence do not fit.
        ValueError: --max-model-len beyond what the model was trained for.
    """
    longest = options.max_model_len or config.max_positions
    if longest > config.max_positions:
        raise ValueError(
            f"--max-model-len {longest} exceeds the model's context of {config.max_positions} tokens; "
            f"ask for at most {config.max_positions}"
        )
    weights = [_weight_bytes(config, shard, formats, dtype, device, plan) for shard in layout.shards]

    def ranks_with(options: EngineOptions) -> tuple[RankBytes, ...]:
        each = zip(layout.shards, weights, strict=True)
        return tuple(
            _rank_bytes(config, shard, options, num_bytes, dtype, device, plan.max_parts) for shard, num_bytes in each
        )

    ranks = ranks_with(options)
    blocks_per_sequence = math.ceil(longest / options.block_size)
    fitting = min(_fitting_blocks(ranks, pool) for pool in pools)
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // sum(rank.block for rank in ranks)
    else:
        share = int(fitting * (_CACHE_SHARE[device] if cache_share is None else cache_share))
        # Where layers compete for the memory, the longest sequence that the model could do is not worth them all.
        least = (
            blocks_per_sequence
            if cache_share is None or options.max_model_len
            else min(blocks_per_sequence, math.ceil(LEAST_CONTEXT / options.block_size))
        )
        num_blocks = min(options.max_num_seqs * blocks_per_sequence, max(share, min(fitting, least)))
    max_model_len = longest if options.max_model_len else min(longest, num_blocks * options.block_size)
    budget = MemoryBudget(
        ranks=ranks, pools=tuple(pools), num_blocks=num_blocks, max_model_len=max_model_len, max_positions=longest
    )
    if fitting < 1:
        raise _refusal(budget, _why_nothing_fits(budget, _smaller_steps(options, pools, ranks_with), dtype, formats))
    _check(budget, options, fitting, _RECOMMENDED_SHARE[device])
    return budget


def _weight_bytes(
    config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: str, device: str, plan: WeightPlan
) -> int:
    """What a rank's weights take of its pool."""
    if not plan.streamed:
        return weight_bytes(config, shard, formats, DTYPE_BYTES[dtype])
    sizes = WeightSizes(config, shard, formats, getattr(torch, dtype), plan.codec)
    return sizes.on_device(plan) + (sizes.extra_on_cpu(plan) if device == "cpu" else 0)


def _smaller_steps(
    options: EngineOptions, pools: Sequence[Pool], ranks_with: Callable[[EngineOptions], Sequence[RankBytes]]
) -> EngineOptions | None:
    """The options with steps halved until something fits beside them; None: not even with steps of one token."""
    num_tokens = options.max_num_batched_tokens
    while num_tokens > 1:
        num_tokens //= 2
        smaller = replace(
            options, max_num_batched_tokens=num_tokens, max_num_seqs=min(num_tokens, options.max_num_seqs)
        )
        ranks = ranks_with(smaller)
        if all(_fitting_blocks(ranks, pool) for pool in pools):
            return smaller
    return None


def _why_nothing_fits(budget: MemoryBudget, smaller: EngineOptions | None, dtype: str, formats: WeightFormats) -> str:
    """For a budget without room for one block: what is too large, and what to do."""
    if smaller is not None:
        return (
            "the activations of a step do not fit; "
            f"--max-num-batched-tokens {smaller.max_num_batched_tokens} --max-num-seqs {smaller.max_num_seqs} does"
        )
    if all(sum(budget.ranks[r].fixed for r in pool.ranks) <= pool.available_bytes for pool in budget.pools):
        return "not one block of the KV cache fits; give a smaller --block-size, such as 16"
    half = " or --dtype bfloat16" if dtype == "float32" else ""
    packed = "" if formats.packed else " or --quantization int8 or int4"
    return f"the weights do not fit; free memory, or choose a smaller model{half}{packed}"


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int, share: float) -> None:
    """Refuse a budget that does not add up, with a value that would."""
    per_block = sum(rank.block for rank in budget.ranks)
    block_size = options.block_size
    needed = math.ceil((options.max_model_len or 2) / block_size)
    if budget.num_blocks > fitting:
        best = max(int(fitting * share), min(needed, fitting))
        fix = f"--kv-cache-memory {_whole_mib(best * per_block)} does"
        raise _refusal(budget, f"the KV cache does not fit; {fix}")
    if budget.num_blocks < needed and fitting < needed:
        fix = f"--max-model-len {fitting * block_size} does"
        raise _refusal(budget, f"one sequence of {options.max_model_len} tokens does not fit; {fix}")
    if budget.num_blocks < needed:
        want = f"{(needed * per_block >> 20) + 1}MiB"
        raise _refusal(
            budget,
            f"--kv-cache-memory {format_bytes(options.kv_cache_memory or 0)} holds {budget.num_blocks * block_size} "
            f"tokens, less than one sequence of {needed * block_size}; give at least {want}",
        )


def _refusal(budget: MemoryBudget, reason: str) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(f"not enough memory: {reason}\n{budget.table()}")


def _whole_mib(num_bytes: int) -> str:
    """Rounded down, unless that would cost a share worth having."""
    return f"{num_bytes >> 20}MiB" if num_bytes >= 64 << 20 else f"{num_bytes}B"


def _fitting_blocks(ranks: Sequence[RankBytes], pool: Pool) -> int:
    left = pool.available_bytes - sum(ranks[r].fixed for r in pool.ranks)
    return max(0, left) // sum(ranks[r].block for r in pool.ranks)


def _rank_bytes(
    config: LlamaConfig,
    shard: Shard,
    options: EngineOptions,
    num_weight_bytes: int,
    dtype: str,
    device: str,
    max_parts: int,
) -> RankBytes:
    """What the rank with ``shard`` will hold."""
    elem = DTYPE_BYTES[dtype]
    return RankBytes(
        weights=num_weight_bytes,
        activations=_activation_bytes(config, shard, options, elem, device, max_parts),
        runtime=_RUNTIME_BYTES[device],
        block=2 * config.num_layers * shard.local_kv_heads * options.block_size * config.head_dim * elem,
    )


def _activation_bytes(
    config: LlamaConfig, shard: Shard, options: EngineOptions, elem_bytes: int, device: str, max_parts: int
) -> int:
    """The widest moment of a step: the MLP's two halves beside the residual, or the logits.

    Rank 0 gathers the logits of all sequences and of a few hundred scored prompt tokens, and samples from a copy.
    CUDA graphs keep the activations of the largest step of generated tokens beside those. Of further parts of a step that
    share a layer there are the residual, what is added to it, and the sum that is on its way.
    """
    num_tokens, num_rows = options.max_num_batched_tokens, options.max_num_seqs + MAX_SCORED_ROWS
    if device == "cuda" and options.cuda_graphs:
        num_tokens += options.max_num_seqs
    layer = elem_bytes * num_tokens * (4 * config.hidden_size + 3 * len(shard.mlp_columns))
    layer += elem_bytes * (max_parts - 1) * options.max_num_batched_tokens * 3 * config.hidden_size
    return layer + 4 * num_rows * (3 * config.vocab_size if shard.rank == 0 else 2 * len(shard.vocab_rows))
