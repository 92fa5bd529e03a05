"""Computes the memory budget of a KV cache in host memory (``--kv-offload``) and describes it.

With CUDA the cache takes host memory and its slots take device memory. On a CPU both are host memory, so offloading
saves nothing there and is only useful for testing.
"""

import math
from collections.abc import Sequence

from tightwire.comm.sizes import format_bytes
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.memory_budget import (
    MemoryBudget,
    Pool,
    fitting_blocks,
    left_bytes,
    longest_sequence,
    refusal,
    whole_mib,
    why_nothing_fits,
)
from tightwire.server.plan.rank_bytes import RankBytes, ranks_maker

# Limits as shares of free memory: the slots on the device, the cache on the host.
_SLOT_SHARE = 0.9
_CACHE_SHARE = {"cuda": 0.8, "cpu": 0.4}


def make_offloaded_budget(
    config: LlamaConfig,
    layout: Layout,
    options: EngineOptions,
    *,
    dtype: str,
    formats: WeightFormats,
    device: str,
    pools: Sequence[Pool],
    host_bytes: int,
    plan: WeightPlan = EVERYTHING_RESIDENT,
    cache_share: float | None = None,
    num_replicas: int = 1,
) -> MemoryBudget:
    """``make_budget`` for a cache in host memory: its blocks, the slot blocks, and the longest sequence.

    Args:
        host_bytes: free on the host after streamed weights; on a CPU, the pool's own.
        cache_share: the slots' limit, as a share of the device memory left by everything else; default: 0.9.
    Raises:
        NotEnoughMemoryError: weights, cache, slots or the longest sequence do not fit.
        ValueError: --max-model-len exceeds the model's context.
    """
    longest, size = longest_sequence(config, options), options.block_size
    ranks_with = ranks_maker(config, layout, formats, dtype, device, plan, num_replicas)
    ranks = ranks_with(options)
    apiece = math.ceil(longest / size)
    fitting_slot = min(fitting_blocks(ranks, pool) for pool in pools)
    host = Pool(name="host memory, for the KV cache", available_bytes=host_bytes, ranks=range(len(ranks)))
    if device == "cpu":
        fitting, host = _fitting_beside_slots(ranks, pools[0]), None
    else:
        fitting = host_bytes // sum(rank.block for rank in ranks)
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // sum(rank.block for rank in ranks)
    else:
        num_blocks = min(options.max_num_seqs * apiece, max(int(fitting * _CACHE_SHARE[device]), min(fitting, apiece)))
    slot_share = _SLOT_SHARE if cache_share is None else cache_share
    slot_blocks = num_blocks
    if device != "cpu":
        slot_blocks = min(num_blocks, max(int(fitting_slot * slot_share), min(fitting_slot, apiece)))
    max_model_len = longest if options.max_model_len else min(longest, slot_blocks * size)
    budget = MemoryBudget(
        ranks=ranks,
        pools=tuple(pools),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_positions=longest,
        room_tokens=min(fitting, fitting_slot) * size,
        num_replicas=num_replicas,
        slot_blocks=slot_blocks,
        host=host,
    )
    if fitting_slot < 1:
        raise refusal(budget, why_nothing_fits(budget, options, ranks_with, dtype, formats))
    _check(budget, options, fitting)
    return budget


def describe_offload(budget: MemoryBudget, config: LlamaConfig, options: EngineOptions, device: str) -> tuple[str, ...]:
    """Lines that say where the cache is and how much a step transfers; empty for a cache on the device."""
    if budget.slot_blocks is None:
        return ()
    size, num_seqs = options.block_size, options.max_num_seqs
    context = max(1, min(budget.max_model_len, budget.slot_blocks * size // num_seqs))
    step_bytes = num_seqs * (math.ceil(context / size) + 1) * max(rank.block for rank in budget.ranks)
    lines = [
        (
            f"KV cache: {budget.num_blocks * size} tokens on the host; two slots for {budget.slot_blocks} blocks "
            f"({budget.slot_blocks * size} tokens) of a layer each"
        ),
        (
            f"a step of {num_seqs} generated tokens, each behind {context}, moves {format_bytes(step_bytes)} a rank "
            f"({config.num_layers} layers, to the device and, of a sequence's last block, back)"
        ),
    ]
    if device == "cuda" and options.cuda_graphs:
        lines.append("no CUDA graphs: a layer's keys and values are in another slot from step to step")
    if device == "cpu":
        lines.append(
            "warning: on a CPU host and device are one memory, so --kv-offload saves none and costs time; it is for trying"
        )
    return tuple(lines)


def _fitting_beside_slots(ranks: Sequence[RankBytes], pool: Pool) -> int:
    """Blocks that fit when the cache and an equal number of slot blocks share one pool."""
    block, slot = sum(ranks[r].block for r in pool.ranks), sum(ranks[r].slot for r in pool.ranks)
    return left_bytes(ranks, pool) // (block + slot)


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int) -> None:
    """Raise if the budget is not feasible, and suggest a value that is."""
    size, per_block = options.block_size, sum(rank.block for rank in budget.ranks)
    needed = math.ceil((options.max_model_len or 2) / size)
    slot_blocks = budget.step_blocks
    if fitting < needed:
        fix = f"--max-model-len {fitting * size} does" if fitting else "free some of it, or give a smaller --block-size"
        raise refusal(budget, f"one sequence of {needed * size} tokens does not fit in host memory; {fix}")
    if budget.num_blocks > fitting:
        fix = f"--kv-cache-memory {whole_mib(fitting * per_block)} does"
        raise refusal(budget, f"the KV cache does not fit on the host; {fix}")
    if budget.num_blocks < needed:
        want = f"{(needed * per_block >> 20) + 1}MiB"
        raise refusal(
            budget,
            f"the KV cache holds {budget.num_blocks * size} tokens, less than one sequence of {needed * size}; give at "
            f"least --kv-cache-memory {want}, or a smaller --max-model-len",
        )
    if slot_blocks < needed:
        raise refusal(
            budget,
            f"a slot holds {slot_blocks * size} tokens, less than one sequence of {needed * size}; "
            f"--max-model-len {slot_blocks * size} would do",
        )
