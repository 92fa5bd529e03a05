"""Computes before loading whether the model fits, and how much KV cache the remaining memory holds.

On a CPU all ranks share the host's memory; with CUDA each rank has its own device. Every rank has the same number of
cache blocks, so the tightest pool decides. Each replica has its own blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightwire.comm.sizes import format_bytes
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.rank_bytes import MemoryInputs, Pool, RankBytes, rank_bytes
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
class MemoryBudget:
    """Sizes of the cache and of everything else in memory."""

    ranks: tuple[RankBytes, ...]
    pools: tuple[Pool, ...]
    num_blocks: int  # per replica
    max_model_len: int
    max_positions: int  # the context of the model, or --max-model-len
    room_tokens: int  # longest sequence the memory could hold, even if a smaller cache was requested
    num_replicas: int = 1
    buffer_blocks: int | None = None  # for a cache on the host: blocks that fit in the device's buffers
    host: Pool | None = None  # the host's pool, if the cache is on the host and ranks are on devices

    @property
    def step_blocks(self) -> int:
        """Most blocks that the sequences of one step may use together."""
        return self.num_blocks if self.buffer_blocks is None else self.buffer_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one cache block over all ranks."""
        return sum(rank.block for rank in self.ranks)

    def cache_bytes(self, rank: RankBytes) -> int:
        """Bytes the cache takes from the rank's pool."""
        buffers = rank.buffer * (self.buffer_blocks or 0)
        return buffers if self.host is not None else buffers + rank.block * self.num_blocks

    def needs(self) -> list[str]:
        """For each pool, its name and how much of it is needed."""
        needs = [
            (pool, sum(self.ranks[r].fixed + self.cache_bytes(self.ranks[r]) for r in pool.ranks))
            for pool in self.pools
        ]
        if self.host is not None:
            needs.append((self.host, self.block_bytes * self.num_blocks))
        return [
            f"{pool.name}: {format_bytes(n)} of {format_bytes(pool.available_bytes)} available" for pool, n in needs
        ]

    def table(self) -> str:
        """One line per rank and one per pool."""
        rows: list[tuple[str, ...]] = [("rank", "weights", "KV cache", "activations", "runtime", "total")]
        for number, rank in enumerate(self.ranks):
            cache = self.cache_bytes(rank)
            sizes = (rank.weights, cache, rank.activations, rank.runtime, rank.fixed + cache)
            name = rank_name(number, len(self.ranks) // self.num_replicas, self.num_replicas)
            rows.append((name, *map(format_bytes, sizes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines += self.needs()
        if 0 < self.max_model_len < self.max_positions:
            lines.append(f"context: {self.max_model_len} of {self.max_positions} tokens, all that the KV cache holds")
        return "\n".join(lines)


def longest_sequence(inputs: MemoryInputs) -> int:
    """``--max-model-len``, or the model's context.

    Raises:
        ValueError: --max-model-len exceeds the model's context.
    """
    most = inputs.model.max_positions
    longest = inputs.options.max_model_len or most
    if longest > most:
        raise ValueError(f"--max-model-len {longest} exceeds the model's context of {most} tokens; use at most {most}")
    return longest


def make_budget(
    inputs: MemoryInputs, plan: WeightPlan = EVERYTHING_RESIDENT, cache_share: float | None = None
) -> MemoryBudget:
    """Choose the number of cache blocks and the longest sequence.

    Args:
        plan: the layers that are streamed.
        cache_share: the cache's limit, as a share of the memory left by everything else; default: the device's share.
    Raises:
        NotEnoughMemoryError: weights, cache or the longest sequence do not fit.
        ValueError: --max-model-len exceeds the model's context.
    """
    options, longest = inputs.options, longest_sequence(inputs)
    ranks = rank_bytes(inputs, plan)
    blocks_per_sequence = math.ceil(longest / BLOCK_SIZE)
    fitting = min(fitting_blocks(ranks, pool) for pool in inputs.pools)
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // sum(rank.block for rank in ranks)
    else:
        share = int(fitting * (_CACHE_SHARE[inputs.device] if cache_share is None else cache_share))
        least = blocks_per_sequence
        if cache_share is not None and not options.max_model_len:
            # Layers compete for this memory, so do not reserve the model's whole context.
            least = min(blocks_per_sequence, math.ceil(LEAST_CONTEXT / BLOCK_SIZE))
        num_blocks = min(options.max_num_seqs * blocks_per_sequence, max(share, min(fitting, least)))
    budget = MemoryBudget(
        ranks=ranks,
        pools=tuple(inputs.pools),
        num_blocks=num_blocks,
        max_model_len=longest if options.max_model_len else min(longest, num_blocks * BLOCK_SIZE),
        max_positions=longest,
        room_tokens=fitting * BLOCK_SIZE,
        num_replicas=inputs.num_replicas,
    )
    if fitting < 1:
        raise refusal(budget, why_nothing_fits(budget, inputs, plan))
    _check(budget, options, fitting, _RECOMMENDED_SHARE[inputs.device])
    return budget


def why_nothing_fits(budget: MemoryBudget, inputs: MemoryInputs, plan: WeightPlan) -> str:
    """Say what is too large and what to do, for a budget without room for one block."""
    smaller = _smaller_steps(inputs, plan)
    if smaller is not None:
        return (
            "the activations of a step do not fit; "
            f"--max-num-batched-tokens {smaller.max_num_batched_tokens} --max-num-seqs {smaller.max_num_seqs} fits"
        )
    if all(sum(budget.ranks[r].fixed for r in pool.ranks) <= pool.available_bytes for pool in budget.pools):
        return "not one block of the KV cache fits; free memory"
    tight = [pool for pool in budget.pools if sum(budget.ranks[r].runtime for r in pool.ranks) >= pool.available_bytes]
    if tight:
        runtime = format_bytes(budget.ranks[tight[0].ranks.start].runtime)
        return (
            f"a process takes {runtime} before it has any tensor (the runtime below), and each rank needs "
            f"{_least_mib(budget, inputs.options)} in all: free that much, or raise a lower --device-memory to it"
        )
    half = " or --dtype bfloat16" if inputs.dtype == "float32" else ""
    packed = "" if inputs.formats.packed else " or --quantization int8 or int4"
    return f"the weights do not fit; free memory, or choose a smaller model{half}{packed}"


def _smaller_steps(inputs: MemoryInputs, plan: WeightPlan) -> EngineOptions | None:
    """The options with the step size halved until the model fits; None: not even steps of one token fit."""
    options, num_tokens = inputs.options, inputs.options.max_num_batched_tokens
    while num_tokens > 1:
        num_tokens //= 2
        smaller = replace(
            options, max_num_batched_tokens=num_tokens, max_num_seqs=min(num_tokens, options.max_num_seqs)
        )
        ranks = rank_bytes(replace(inputs, options=smaller), plan)
        if all(fitting_blocks(ranks, pool) for pool in inputs.pools):
            return smaller
    return None


def _least_mib(budget: MemoryBudget, options: EngineOptions) -> str:
    """MiB that each rank of the most loaded pool needs for one sequence, and for the requested cache."""
    num_blocks = math.ceil((options.max_model_len or 2) / BLOCK_SIZE)
    if options.kv_cache_memory is not None:
        num_blocks = max(num_blocks, options.kv_cache_memory // budget.block_bytes)
    needs = []
    for pool in budget.pools:
        ranks = [budget.ranks[r] for r in pool.ranks]
        cache = sum(rank.buffer + (0 if budget.host is not None else rank.block) for rank in ranks)
        needs.append((sum(rank.fixed for rank in ranks) + num_blocks * cache) / len(ranks))
    return f"{math.ceil(max(needs) / (1 << 20))}MiB"


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int, share: float) -> None:
    """Raise if the budget is not feasible, and suggest a value that is."""
    size, per_block = BLOCK_SIZE, budget.block_bytes
    needed = math.ceil((options.max_model_len or 2) / size)
    if budget.num_blocks > fitting:
        best = max(int(fitting * share), min(needed, fitting))
        raise refusal(budget, f"the KV cache does not fit; --kv-cache-memory {whole_mib(best * per_block)} fits")
    if budget.num_blocks >= needed:
        return
    if fitting < needed:
        fix = f"--max-model-len {fitting * size} fits"
        raise refusal(budget, f"one sequence of {options.max_model_len} tokens does not fit; {fix}")
    want = f"{(needed * per_block >> 20) + 1}MiB"
    raise refusal(
        budget,
        f"--kv-cache-memory {format_bytes(options.kv_cache_memory or 0)} holds {budget.num_blocks * size} tokens, less "
        f"than one sequence of {needed * size}; give at least {want}",
    )


def refusal(budget: MemoryBudget, reason: str) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(f"not enough memory: {reason}\n{budget.table()}")


def whole_mib(num_bytes: int) -> str:
    """Rounded down to MiB, or exact below 64 MiB, where rounding would waste a large share."""
    return f"{num_bytes >> 20}MiB" if num_bytes >= 64 << 20 else f"{num_bytes}B"


def fitting_blocks(ranks: Sequence[RankBytes], pool: Pool) -> int:
    """Blocks that fit in the pool after everything else; for a cache on the host, blocks in the buffers."""
    return left_bytes(ranks, pool) // sum(ranks[r].buffer or ranks[r].block for r in pool.ranks)


def left_bytes(ranks: Sequence[RankBytes], pool: Pool) -> int:
    return max(0, pool.available_bytes - sum(ranks[r].fixed for r in pool.ranks))
