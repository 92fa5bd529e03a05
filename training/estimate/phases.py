"""Computes what a sparse compressor sends at each sparsity, beside dense sums, and advises where it sends more."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tightwire.sizes import format_bytes
from tightwire.training.compression.make import compressor_bytes
from tightwire.training.config.compression import (
    CompressorOptions,
    DenseOptions,
    DgcOptions,
    SparseOptions,
    TopKOptions,
)
from tightwire.training.engine.flat_parameters import BucketPlan, cut_shard

_MOST_REPLICAS = 128  # the article on DGC in Paddle asks for dense sums above


class Phase(NamedTuple):
    """The steps from one change of sparsity to the next. ``sent_bytes`` of a step; ``sparsity`` None: every element."""

    sparsity: float | None
    sent_bytes: int


def sparse_phases(
    options: DgcOptions | TopKOptions, plan: BucketPlan, replicas: int
) -> tuple[Mapping[int, Phase], int]:
    """Each phase by its first step, and the bytes of a step with dense sums: those that replica 0 sends of shard 0."""
    shards = [cut_shard(param, 0, plan.shard_ranks) for param in plan.flat_params if param.trainable]

    def sent_bytes(compressor: CompressorOptions, step: int) -> int:
        return sum(compressor_bytes(compressor, shard, rank=0, world_size=replicas, step=step) for shard in shards)

    phases = {first: Phase(sparsity, sent_bytes(options, first)) for first, sparsity in options.phases().items()}
    return phases, sent_bytes(DenseOptions(), 0)


def advice(options: CompressorOptions, plan: BucketPlan, replicas: int) -> Iterator[str]:
    """Sentences on what ``options`` waste between ``replicas``; none if they waste nothing."""
    if not isinstance(options, SparseOptions) or replicas == 1:
        return
    phases, dense_bytes = sparse_phases(options, plan, replicas)
    sparse = {first: phase for first, phase in phases.items() if phase.sparsity is not None}
    wasteful = [first for first, phase in sparse.items() if phase.sent_bytes > dense_bytes]
    useful = [first for first in sparse if first > max(wasteful, default=0)]
    if wasteful:
        phase = phases[wasteful[0]]
        yield (
            f"parallel.between sends {format_bytes(phase.sent_bytes)} a step at sparsity {phase.sparsity:g}, and dense sums "
            f"{format_bytes(dense_bytes)}: every one of {replicas} replicas receives the elements of all others; "
            + (
                f"make the first {useful[0]} steps dense: rampup_begin_step={useful[0]}, rampup_step="
                f"{max(1, options.rampup_begin_step + options.rampup_step - useful[0])}, "
                f"sparsity=[{', '.join(f'{phases[first].sparsity:g}' for first in useful)}]"
                if useful
                else "use parallel.between.kind=dense, or a higher sparsity"
            )
        )
    if replicas > _MOST_REPLICAS:
        yield (
            f"parallel.between.kind={options.kind} has {replicas} replicas, and its bytes grow with their number; above "
            f"{_MOST_REPLICAS} use dense or quantized sums, or a sharding with fewer replicas"
        )
