"""Computes before loading whether the model fits, and how much KV cache the remaining memory holds.

On a CPU all ranks share the host's memory; with CUDA each rank has its own device. Every rank has the same number of
cache blocks, so the tightest pool decides. Each replica has its own blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightwire.comm.sizes import format_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.rank_bytes import RankBytes, RanksWith, ranks_maker
from tightwire.server.plan.rank_setup import rank_name

# No other program is expected on a device; on a host, other programs and the page cache need memory too.
_CACHE_SHARE = {"cpu": 0.4, "cuda": 0.9}
# Share of free memory that messages recommend: host memory fluctuates, and the HTTP process needs some.
_RECOMMENDED_SHARE = {"cpu": 0.8, "cuda": 0.95}

# Stream a few layers rather than accept a context shorter than this many tokens.
LEAST_CONTEXT = 2048


class NotEnoughMemoryError(ValueError):
    """The model does not fit. The message holds the budget as a table and suggests what would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Memory shared by some ranks."""

    name: str
    available_bytes: int
    ranks: range


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Sizes of the cache and of everything else in memory."""

    ranks: tuple[RankBytes, ...]
    pools: tuple[Pool, ...]
    num_blocks: int  # per replica
    max_model_len: int
    max_positions: int  # the context of the model, or --max-model-len
    room_tokens: int  # longest sequence the memory could hold, even if a smaller cache was requested
    num_replicas: int = 1
    slot_blocks: int | None = None  # for a cache on the host: blocks that fit in the device's slots
    host: Pool | None = None  # the host's pool, if the cache is on the host and ranks are on devices

    @property
    def step_blocks(self) -> int:
        """Most blocks that the sequences of one step may use together."""
        return self.num_blocks if self.slot_blocks is None else self.slot_blocks

    def cache_bytes(self, rank: RankBytes) -> int:
        """Bytes the cache takes from the rank's pool."""
        slots = rank.slot * (self.slot_blocks or 0)
        return slots if self.host is not None else slots + rank.block * self.num_blocks

    def table(self) -> str:
        """One line per rank and one per pool."""
        rows: list[tuple[str, ...]] = [("rank", "weights", "KV cache", "activations", "runtime", "total")]
        for number, rank in enumerate(self.ranks):
            cache = self.cache_bytes(rank)
            sizes = (rank.weights, cache, rank.activations, rank.runtime, rank.fixed + cache)
            rows.append(
                (rank_name(number, len(self.ranks) // self.num_replicas, self.num_replicas), *map(format_bytes, sizes))
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        for pool in self.pools:
            need = sum(self.ranks[r].fixed + self.cache_bytes(self.ranks[r]) for r in pool.ranks)
            lines.append(f"{pool.name}: {format_bytes(need)} of {format_bytes(pool.available_bytes)} available")
        if self.host is not None:
            need = sum(rank.block * self.num_blocks for rank in self.ranks)
            lines.append(
                f"{self.host.name}: {format_bytes(need)} of {format_bytes(self.host.available_bytes)} available"
            )
        if 0 < self.max_model_len < self.max_positions:
            lines.append(f"context: {self.max_model_len} of {self.max_positions} tokens, all that the KV cache holds")
        return "\n".join(lines)


def longest_sequence(config: LlamaConfig, options: EngineOptions) -> int:
    """``--max-model-len``, or the model's context.

    Raises:
        ValueError: --max-model-len exceeds the model's context.
    """
    longest = options.max_model_len or config.max_positions
    if longest > config.max_positions:
        raise ValueError(
            f"--max-model-len {longest} exceeds the model's context of {config.max_positions} tokens; "
            f"ask for at most {config.max_positions}"
        )
    return longest


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
    num_replicas: int = 1,
) -> MemoryBudget:
    """Choose the number of cache blocks and the longest sequence.

    Args:
        dtype: of unpacked weights; ``formats`` says which weights are packed.
        plan: the layers that are streamed.
        num_replicas: copies of the layout's ranks; ``pools`` number the ranks of all replicas in order.
        cache_share: the cache's limit, as a share of the memory left by everything else; default: the device's share.
    Raises:
        NotEnoughMemoryError: weights, cache or the longest sequence do not fit.
        ValueError: --max-model-len exceeds the model's context.
    """
    longest = longest_sequence(config, options)
    ranks_with = ranks_maker(config, layout, formats, dtype, device, plan, num_replicas)
    ranks = ranks_with(options)
    blocks_per_sequence = math.ceil(longest / options.block_size)
    fitting = min(fitting_blocks(ranks, pool) for pool in pools)
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // sum(rank.block for rank in ranks)
    else:
        share = int(fitting * (_CACHE_SHARE[device] if cache_share is None else cache_share))
        # Layers compete for this memory, so do not reserve the model's whole context.
        least = (
            blocks_per_sequence
            if cache_share is None or options.max_model_len
            else min(blocks_per_sequence, math.ceil(LEAST_CONTEXT / options.block_size))
        )
        num_blocks = min(options.max_num_seqs * blocks_per_sequence, max(share, min(fitting, least)))
    max_model_len = longest if options.max_model_len else min(longest, num_blocks * options.block_size)
    budget = MemoryBudget(
        ranks=ranks,
        pools=tuple(pools),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_positions=longest,
        room_tokens=fitting * options.block_size,
        num_replicas=num_replicas,
    )
    if fitting < 1:
        raise refusal(budget, why_nothing_fits(budget, options, ranks_with, dtype, formats))
    _check(budget, options, fitting, _RECOMMENDED_SHARE[device])
    return budget


def _smaller_steps(options: EngineOptions, pools: Sequence[Pool], ranks_with: RanksWith) -> EngineOptions | None:
    """The options with the step size halved until the model fits; None: not even steps of one token fit."""
    num_tokens = options.max_num_batched_tokens
    while num_tokens > 1:
        num_tokens //= 2
        smaller = replace(
            options, max_num_batched_tokens=num_tokens, max_num_seqs=min(num_tokens, options.max_num_seqs)
        )
        ranks = ranks_with(smaller)
        if all(fitting_blocks(ranks, pool) for pool in pools):
            return smaller
    return None


def why_nothing_fits(
    budget: MemoryBudget, options: EngineOptions, ranks_with: RanksWith, dtype: str, formats: WeightFormats
) -> str:
    """Say what is too large and what to do, for a budget without room for one block."""
    smaller = _smaller_steps(options, budget.pools, ranks_with)
    if smaller is not None:
        return (
            "the activations of a step do not fit; "
            f"--max-num-batched-tokens {smaller.max_num_batched_tokens} --max-num-seqs {smaller.max_num_seqs} does"
        )
    if all(sum(budget.ranks[r].fixed for r in pool.ranks) <= pool.available_bytes for pool in budget.pools):
        return "not one block of the KV cache fits; give a smaller --block-size, such as 16"
    tight = [pool for pool in budget.pools if sum(budget.ranks[r].runtime for r in pool.ranks) >= pool.available_bytes]
    if tight:
        runtime = format_bytes(budget.ranks[tight[0].ranks.start].runtime)
        return (
            f"a process takes {runtime} before it has any tensor (the runtime below); all that is asked for takes "
            f"{_least_mib(budget, options)} a rank: free so much, or raise --device-memory to it where that was lower"
        )
    half = " or --dtype bfloat16" if dtype == "float32" else ""
    packed = "" if formats.packed else " or --quantization int8 or int4"
    return f"the weights do not fit; free memory, or choose a smaller model{half}{packed}"


def _least_mib(budget: MemoryBudget, options: EngineOptions) -> str:
    """MiB that each rank of the most loaded pool needs for one sequence, and for the requested cache."""
    num_blocks = math.ceil((options.max_model_len or 2) / options.block_size)
    if options.kv_cache_memory is not None:
        num_blocks = max(num_blocks, options.kv_cache_memory // sum(rank.block for rank in budget.ranks))
    needs = []
    for pool in budget.pools:
        ranks = [budget.ranks[r] for r in pool.ranks]
        cache = sum(rank.slot + (0 if budget.host is not None else rank.block) for rank in ranks)
        needs.append((sum(rank.fixed for rank in ranks) + num_blocks * cache) / len(ranks))
    return f"{math.ceil(max(needs) / (1 << 20))}MiB"


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int, share: float) -> None:
    """Raise if the budget is not feasible, and suggest a value that is."""
    per_block = sum(rank.block for rank in budget.ranks)
    block_size = options.block_size
    needed = math.ceil((options.max_model_len or 2) / block_size)
    if budget.num_blocks > fitting:
        best = max(int(fitting * share), min(needed, fitting))
        fix = f"--kv-cache-memory {whole_mib(best * per_block)} does"
        raise refusal(budget, f"the KV cache does not fit; {fix}")
    if budget.num_blocks < needed and fitting < needed:
        fix = f"--max-model-len {fitting * block_size} does"
        raise refusal(budget, f"one sequence of {options.max_model_len} tokens does not fit; {fix}")
    if budget.num_blocks < needed:
        want = f"{(needed * per_block >> 20) + 1}MiB"
        raise refusal(
            budget,
            f"--kv-cache-memory {format_bytes(options.kv_cache_memory or 0)} holds {budget.num_blocks * block_size} "
            f"tokens, less than one sequence of {needed * block_size}; give at least {want}",
        )


def refusal(budget: MemoryBudget, reason: str) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(f"not enough memory: {reason}\n{budget.table()}")


def whole_mib(num_bytes: int) -> str:
    """Rounded down, unless that would cost a share worth having."""
    return f"{num_bytes >> 20}MiB" if num_bytes >= 64 << 20 else f"{num_bytes}B"


def fitting_blocks(ranks: Sequence[RankBytes], pool: Pool) -> int:
    """Blocks that fit in the pool after everything else; for a cache on the host, slot blocks."""
    return left_bytes(ranks, pool) // sum(ranks[r].slot or ranks[r].block for r in pool.ranks)


def left_bytes(ranks: Sequence[RankBytes], pool: Pool) -> int:
    return max(0, pool.available_bytes - sum(ranks[r].fixed for r in pool.ranks))
