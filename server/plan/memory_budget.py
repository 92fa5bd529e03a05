"""Computes before loading whether the model fits, and how much KV cache the remaining memory holds.

Every rank has the same number of cache blocks, so the tightest pool decides: on a CPU the host's memory or what a rank may use of
it, with CUDA each device's. With ``--kv-offload`` the cache takes host memory, and two buffers of some blocks take device memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightwire.model.checkpoint.config import check_context
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.rank_bytes import CacheShape, MemoryInputs, Pool, RankBytes, rank_bytes
from tightwire.server.plan.rank_setup import rank_name
from tightwire.sizes import aligned, format_bytes

# The cache's share of free memory. No other program is expected on a device; a host's memory fluctuates.
_CACHE_SHARE = {"cpu": 0.4, "cuda": 0.9}
_HOST_CACHE_SHARE = {"cpu": 0.4, "cuda": 0.8}  # of a cache with --kv-offload
# Share of free memory that messages recommend: the HTTP process needs some.
_RECOMMENDED_SHARE = {"cpu": 0.8, "cuda": 0.95}

_OPTIONAL_COLUMNS = ("adapters", "draft model", "carried errors")  # of the table: left out where no rank has any

# Stream a few layers rather than accept a context shorter than this many tokens.
LEAST_CONTEXT = 2048


class NotEnoughMemoryError(ValueError):
    """The model does not fit. The message holds the budget as a table and suggests what would fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    ranks: tuple[RankBytes, ...]
    pools: tuple[Pool, ...]
    num_blocks: int  # per replica
    max_model_len: int
    max_positions: int  # the context of the model, or --max-model-len
    room_tokens: int  # longest sequence the memory could hold, even if a smaller cache was requested
    shape: CacheShape
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

    def needs(self) -> list[tuple[str, str]]:
        """For each pool, its name and how much of it is needed."""
        used = [rank.fixed + self.cache_bytes(rank) for rank in self.ranks]
        sums = [(pool, sum(used[r] for r in pool.ranks) - pool.counted_again) for pool in self.pools]
        if self.host is not None:
            sums.append((self.host, self.block_bytes * self.num_blocks))
        return [(pool.name, f"{format_bytes(n)} of {format_bytes(pool.available_bytes)} available") for pool, n in sums]

    def table(self) -> str:
        """One line per rank and one per pool."""
        columns: dict[str, list[int]] = {
            "weights": [rank.weights for rank in self.ranks],
            "adapters": [rank.adapters for rank in self.ranks],
            "draft model": [rank.draft for rank in self.ranks],
            "KV cache": [self.cache_bytes(rank) for rank in self.ranks],
            "activations": [rank.activations for rank in self.ranks],
            "carried errors": [rank.feedback for rank in self.ranks],
            "runtime": [rank.runtime for rank in self.ranks],
            "total": [rank.fixed + self.cache_bytes(rank) for rank in self.ranks],
        }
        shown = {name: sizes for name, sizes in columns.items() if name not in _OPTIONAL_COLUMNS or any(sizes)}
        rows: list[tuple[str, ...]] = [("rank", *shown)]
        for number in range(len(self.ranks)):
            name = rank_name(number, len(self.ranks) // self.num_replicas, self.num_replicas)
            rows.append((name, *(format_bytes(sizes[number]) for sizes in shown.values())))
        lines = aligned(rows, num_left=0) + [f"{name}: {need}" for name, need in self.needs()]
        if self.num_blocks and (by_kind := self.shape.describe(self.max_model_len)):
            lines.append(f"KV cache: {self.num_blocks} blocks; {by_kind}")
        if 0 < self.max_model_len < self.max_positions:
            lines.append(f"context: {self.max_model_len} of {self.max_positions} tokens, all that the KV cache holds")
        return "\n".join(lines)


def make_budget(
    inputs: MemoryInputs, plan: WeightPlan = EVERYTHING_RESIDENT, cache_share: float | None = None
) -> MemoryBudget:
    """Choose the number of cache blocks and the longest sequence.

    ``cache_share``: limit of the cache, or with ``--kv-offload`` of its buffers, as a share of the memory left for it.
    NotEnoughMemoryError: weights, cache or the longest sequence do not fit. ValueError: --max-model-len is too long.
    """
    options, device, longest = inputs.options, inputs.device, inputs.options.max_model_len or inputs.model.max_positions
    check_context(inputs.model.max_positions, longest)
    ranks = rank_bytes(inputs, plan)
    shape = CacheShape.of(inputs.model, options, plan.max_parts, bounded=inputs.stages is None)
    per_sequence, block_bytes = shape.blocks(longest), sum(rank.block for rank in ranks)
    on_device = min(_fitting_blocks(ranks, pool) for pool in inputs.pools)  # with --kv-offload: blocks in the buffers
    device_share = _CACHE_SHARE["cuda" if options.kv_offload else device] if cache_share is None else cache_share
    host, fitting, share, least = None, on_device, device_share, per_sequence
    if options.kv_offload:
        share = _HOST_CACHE_SHARE[device]
        host, fitting = _host_pool(inputs, plan, ranks)
    elif cache_share is not None and not options.max_model_len:
        # Layers compete for this memory, so do not reserve the model's whole context.
        least = min(per_sequence, shape.blocks(LEAST_CONTEXT))
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // block_bytes
    else:
        num_blocks = min(options.max_num_seqs * per_sequence, max(int(fitting * share), min(fitting, least)))
    step_blocks = num_blocks
    if host is not None:
        step_blocks = min(num_blocks, max(int(on_device * device_share), min(on_device, per_sequence)))
    budget = MemoryBudget(
        ranks=ranks,
        pools=tuple(inputs.pools),
        num_blocks=num_blocks,
        max_model_len=longest if options.max_model_len else min(longest, shape.tokens(step_blocks)),
        max_positions=longest,
        room_tokens=shape.tokens(min(fitting, on_device)),
        shape=shape,
        num_replicas=inputs.num_replicas,
        buffer_blocks=step_blocks if options.kv_offload else None,
        host=host,
    )
    if on_device < 1:
        raise _refusal(budget, _why_nothing_fits(budget, inputs, plan))
    _check(budget, options, fitting, 1.0 if options.kv_offload else _RECOMMENDED_SHARE[device])
    return budget


def _host_pool(inputs: MemoryInputs, plan: WeightPlan, ranks: Sequence[RankBytes]) -> tuple[Pool | None, int]:
    """The host memory left for the cache (None on a CPU, whose pools hold it), and the blocks that fit."""
    if inputs.device == "cpu":
        both = [replace(rank, buffer=rank.block + rank.buffer) for rank in ranks]  # they lie in one memory
        return None, min(_fitting_blocks(both, pool) for pool in inputs.pools)
    on_host = inputs.num_replicas * sum(size.on_host(plan) for size in inputs.weight_sizes(plan.codec))
    free = max(0, inputs.host_bytes - on_host)
    pool = Pool(name="host memory, for the KV cache", available_bytes=free, ranks=range(len(ranks)))
    return pool, free // sum(rank.block for rank in ranks)


def describe_offload(budget: MemoryBudget, inputs: MemoryInputs) -> tuple[str, ...]:
    """Lines that say where the cache is and how much a step transfers; empty for a cache on the device."""
    if budget.buffer_blocks is None:
        return ()
    num_seqs, num_tokens = inputs.options.max_num_seqs, budget.buffer_blocks * BLOCK_SIZE
    context = max(1, min(budget.max_model_len, num_tokens // num_seqs))
    step_bytes = num_seqs * (math.ceil(context / BLOCK_SIZE) + 1) * max(rank.block for rank in budget.ranks)
    buffers = f"two buffers, each for {budget.buffer_blocks} blocks ({num_tokens} tokens) of a layer"
    moved = f"{inputs.model.num_layers} layers to the device, and each sequence's last block back"
    step = f"a step of {num_seqs} generated tokens, each after {context}, moves {format_bytes(step_bytes)} a rank ({moved})"
    lines = [f"KV cache: {budget.num_blocks * BLOCK_SIZE} tokens on the host; {buffers}", step]
    if inputs.device == "cuda" and inputs.options.cuda_graphs:
        lines.append("no CUDA graphs: the buffer that holds a layer's keys and values changes from step to step")
    if inputs.device == "cpu":
        lines.append("warning: on a CPU, host and device are one memory, so --kv-offload costs time; use it to test")
    return tuple(lines)


def _why_nothing_fits(budget: MemoryBudget, inputs: MemoryInputs, plan: WeightPlan) -> str:
    """What is too large and what to do, for a budget without room for one block."""
    if (smaller := _smaller_steps(inputs, plan)) is not None:
        step = f"--max-num-batched-tokens {smaller.max_num_batched_tokens} --max-num-seqs {smaller.max_num_seqs}"
        return f"the activations of a step do not fit; {step} fits"
    if all(sum(budget.ranks[r].fixed for r in pool.ranks) <= pool.room for pool in budget.pools):
        return "not one block of the KV cache fits; free memory"
    tight = [pool for pool in budget.pools if sum(budget.ranks[r].runtime for r in pool.ranks) >= pool.room]
    if tight:
        runtime = format_bytes(budget.ranks[tight[0].ranks.start].runtime)
        needs = f"{_least_mib(budget, inputs.options)} in all: free that much, or raise a lower --device-memory or `ulimit -v`"
        return f"a process takes {runtime} before it has any tensor (the runtime below), and each rank needs {needs}"
    half = " or --dtype bfloat16" if inputs.dtype == "float32" else ""
    packed = "" if inputs.formats.packed else " or --quantization int8 or int4"
    return f"the weights do not fit; free memory, or choose a smaller model{half}{packed}"


def _smaller_steps(inputs: MemoryInputs, plan: WeightPlan) -> EngineOptions | None:
    """The options with the step size halved until the model fits; None: not even steps of one token fit."""
    options, most = inputs.options, inputs.options.max_num_batched_tokens
    while most > 1:
        most //= 2
        smaller = replace(options, max_num_batched_tokens=most, max_num_seqs=min(most, options.max_num_seqs))
        ranks = rank_bytes(replace(inputs, options=smaller), plan)
        if all(_fitting_blocks(ranks, pool) for pool in inputs.pools):
            return smaller
    return None


def _least_mib(budget: MemoryBudget, options: EngineOptions) -> str:
    """MiB that each rank of the most loaded pool needs for one sequence, and for the requested cache."""
    num_blocks = budget.shape.blocks(options.max_model_len or 2)
    if options.kv_cache_memory is not None:
        num_blocks = max(num_blocks, options.kv_cache_memory // budget.block_bytes)
    needs = []
    for pool in budget.pools:
        ranks = [budget.ranks[r] for r in pool.ranks]
        cache = sum(rank.buffer + (0 if budget.host is not None else rank.block) for rank in ranks)
        needs.append((sum(rank.fixed for rank in ranks) - pool.counted_again + num_blocks * cache) / len(ranks))
    return f"{math.ceil(max(needs) / (1 << 20))}MiB"


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int, share: float) -> None:
    """Raise if the budget is not feasible, and suggest a value that is. ``fitting``: blocks that memory holds."""
    shape, least, where = budget.shape, options.max_model_len or 2, " in host memory" if options.kv_offload else ""
    needed, least, problem = shape.blocks(least), math.ceil(least / BLOCK_SIZE) * BLOCK_SIZE, None
    if fitting < needed:
        fix = f"--max-model-len {shape.tokens(fitting)} fits" if shape.tokens(fitting) else "free some of it"
        problem = f"one sequence of {least} tokens does not fit{where}; {fix}"
    elif budget.num_blocks > fitting:
        best = max(int(fitting * share), needed) * budget.block_bytes
        # Rounded down to MiB, but not below 64 MiB, where rounding would waste a large share.
        fix = f"{best >> 20}MiB" if best >= 64 << 20 else f"{best}B"
        problem = f"the KV cache does not fit{where}; --kv-cache-memory {fix} fits"
    elif budget.num_blocks < needed:
        held = f"{format_bytes(options.kv_cache_memory or 0)} holds {shape.tokens(budget.num_blocks)} tokens"
        fix = f"--kv-cache-memory {(needed * budget.block_bytes >> 20) + 1}MiB, or a smaller --max-model-len"
        problem = f"--kv-cache-memory {held}, less than one sequence of {least}; give at least {fix}"
    elif budget.step_blocks < needed:
        held = shape.tokens(budget.step_blocks)
        problem = f"a buffer holds {held} tokens, less than one sequence of {least}; --max-model-len {held} fits"
    if problem:
        raise _refusal(budget, problem)


def _refusal(budget: MemoryBudget, reason: str) -> NotEnoughMemoryError:
    return NotEnoughMemoryError(f"not enough memory: {reason}\n{budget.table()}")


def _fitting_blocks(ranks: Sequence[RankBytes], pool: Pool) -> int:
    """Blocks that fit in the pool after everything else; for a cache on the host, blocks in the buffers."""
    left_bytes = max(0, pool.room - sum(ranks[r].fixed for r in pool.ranks))
    return left_bytes // sum(ranks[r].buffer or ranks[r].block for r in pool.ranks)
