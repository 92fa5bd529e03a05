"""Computes the memory budget of a KV cache in host memory (``--kv-offload``) and describes it.

With CUDA the cache takes host memory and its buffers take device memory. On a CPU both are host memory, so offloading
saves nothing there and is only useful for testing.
"""

import math
from dataclasses import replace

from tightwire.comm.sizes import format_bytes
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.memory_budget import (
    MemoryBudget,
    fitting_blocks,
    left_bytes,
    longest_sequence,
    make_budget,
    refusal,
    whole_mib,
    why_nothing_fits,
)
from tightwire.server.plan.rank_bytes import MemoryInputs, Pool, rank_bytes

# Limits as shares of free memory: the buffers on the device, the cache on the host.
_BUFFER_SHARE = 0.9
_CACHE_SHARE = {"cuda": 0.8, "cpu": 0.4}


def budget_of(inputs: MemoryInputs, plan: WeightPlan, cache_share: float | None) -> MemoryBudget:
    """``make_budget``, or with ``--kv-offload`` the same for a cache in the host memory that streamed layers leave."""
    if not inputs.options.kv_offload:
        return make_budget(inputs, plan, cache_share)
    on_host = inputs.num_replicas * sum(size.on_host(plan) for size in inputs.weight_sizes(plan.codec))
    beside_weights = replace(inputs, host_bytes=max(0, inputs.host_bytes - on_host))
    return make_offloaded_budget(beside_weights, plan, cache_share)


def make_offloaded_budget(
    inputs: MemoryInputs, plan: WeightPlan = EVERYTHING_RESIDENT, cache_share: float | None = None
) -> MemoryBudget:
    """``make_budget`` for a cache in host memory: its blocks, the blocks in the buffers, and the longest sequence.

    Args:
        cache_share: the buffers' limit, as a share of the device memory left by everything else; default: 0.9.
    Raises:
        NotEnoughMemoryError: weights, cache, buffers or the longest sequence do not fit.
        ValueError: --max-model-len exceeds the model's context.
    """
    options, device, size = inputs.options, inputs.device, BLOCK_SIZE
    longest, ranks = longest_sequence(inputs), rank_bytes(inputs, plan)
    block_bytes, per_sequence = sum(rank.block for rank in ranks), math.ceil(longest / size)
    fitting_buffer = min(fitting_blocks(ranks, pool) for pool in inputs.pools)
    if device == "cpu":  # the cache and as many blocks in the buffers share the only pool
        host = None
        fitting = left_bytes(ranks, inputs.pools[0]) // (block_bytes + sum(rank.buffer for rank in ranks))
    else:
        name = "host memory, for the KV cache"
        host = Pool(name=name, available_bytes=inputs.host_bytes, ranks=range(len(ranks)))
        fitting = inputs.host_bytes // block_bytes
    if options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // block_bytes
    else:
        share = max(int(fitting * _CACHE_SHARE[device]), min(fitting, per_sequence))
        num_blocks = min(options.max_num_seqs * per_sequence, share)
    buffer_blocks = num_blocks
    if device != "cpu":
        share = int(fitting_buffer * (_BUFFER_SHARE if cache_share is None else cache_share))
        buffer_blocks = min(num_blocks, max(share, min(fitting_buffer, per_sequence)))
    budget = MemoryBudget(
        ranks=ranks,
        pools=tuple(inputs.pools),
        num_blocks=num_blocks,
        max_model_len=longest if options.max_model_len else min(longest, buffer_blocks * size),
        max_positions=longest,
        room_tokens=min(fitting, fitting_buffer) * size,
        num_replicas=inputs.num_replicas,
        buffer_blocks=buffer_blocks,
        host=host,
    )
    if fitting_buffer < 1:
        raise refusal(budget, why_nothing_fits(budget, inputs, plan))
    _check(budget, options, fitting)
    return budget


def describe_offload(budget: MemoryBudget, inputs: MemoryInputs) -> tuple[str, ...]:
    """Lines that say where the cache is and how much a step transfers; empty for a cache on the device."""
    if budget.buffer_blocks is None:
        return ()
    size, num_seqs = BLOCK_SIZE, inputs.options.max_num_seqs
    context = max(1, min(budget.max_model_len, budget.buffer_blocks * size // num_seqs))
    step_bytes = num_seqs * (math.ceil(context / size) + 1) * max(rank.block for rank in budget.ranks)
    lines = [
        (
            f"KV cache: {budget.num_blocks * size} tokens on the host; two buffers, each for {budget.buffer_blocks} "
            f"blocks ({budget.buffer_blocks * size} tokens) of a layer"
        ),
        (
            f"a step of {num_seqs} generated tokens, each after {context}, moves {format_bytes(step_bytes)} a rank "
            f"({inputs.model.num_layers} layers to the device, and each sequence's last block back)"
        ),
    ]
    if inputs.device == "cuda" and inputs.options.cuda_graphs:
        lines.append("no CUDA graphs: the buffer that holds a layer's keys and values changes from step to step")
    if inputs.device == "cpu":
        lines.append(
            "warning: on a CPU, host and device are one memory, so --kv-offload only costs time; use it to test"
        )
    return tuple(lines)


def _check(budget: MemoryBudget, options: EngineOptions, fitting: int) -> None:
    """Raise if the budget is not feasible, and suggest a value that is."""
    size, per_block = BLOCK_SIZE, budget.block_bytes
    needed = math.ceil((options.max_model_len or 2) / size)
    if fitting < needed:
        fix = f"--max-model-len {fitting * size} fits" if fitting else "free some of it"
        raise refusal(budget, f"one sequence of {needed * size} tokens does not fit in host memory; {fix}")
    if budget.num_blocks > fitting:
        fix = f"--kv-cache-memory {whole_mib(fitting * per_block)} fits"
        raise refusal(budget, f"the KV cache does not fit on the host; {fix}")
    if budget.num_blocks < needed:
        want = f"{(needed * per_block >> 20) + 1}MiB"
        raise refusal(
            budget,
            f"the KV cache holds {budget.num_blocks * size} tokens, less than one sequence of {needed * size}; give at "
            f"least --kv-cache-memory {want}, or a smaller --max-model-len",
        )
    if budget.step_blocks < needed:
        raise refusal(
            budget,
            f"a buffer holds {budget.step_blocks * size} tokens, less than one sequence of {needed * size}; "
            f"--max-model-len {budget.step_blocks * size} fits",
        )
