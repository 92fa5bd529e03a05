"""The bytes, operations, memory and predicted seconds of one training step on one rank, and advice on sparse gradients."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from timeit import repeat
from typing import NamedTuple

import torch

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.sizes import format_bytes
from tightwire.training.compression.compressors import NORM_BYTES, compressor_bytes, inside_bytes
from tightwire.training.config.optimizer import CompressorOptions, DenseOptions, DgcOptions, SparseOptions, TopKOptions
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.costs import Flow, step_traffic
from tightwire.training.engine.flat_parameters import BucketPlan, cut_shard
from tightwire.training.engine.options import EngineOptions
from tightwire.training.estimate.memory import RankMemory, rank_memory
from tightwire.training.start.model import plan_model

_MOST_REPLICAS = 128  # the article on DGC in Paddle asks for dense sums above
_SMALL_SIDE, _CPU_SIDE, _GPU_SIDE = 256, 1024, 4096
_LONGEST_PRODUCT_S = 1.5


class CompressorBytes(NamedTuple):
    """Bytes and rounds of the gradient compressor for one flat parameter."""

    inside: int
    between_nodes: int
    rounds: int


@dataclass(frozen=True, slots=True)
class StepModel:
    """One step after the first. Bytes are those that ``topology``'s rank sends; ranks differ with a sparse compressor."""

    config: TrainConfig
    options: EngineOptions
    llama: LlamaConfig
    topology: Topology
    step: int
    plan: BucketPlan
    flows: Sequence[Flow]
    compressors: Mapping[str, CompressorBytes]

    @property
    def between_nodes(self) -> int:
        """Bytes to other nodes."""
        flows = sum(flow.calls * flow.bytes_between_nodes for flow in self.flows)
        return flows + sum(each.between_nodes for each in self.compressors.values())

    @property
    def inside_nodes(self) -> int:
        """Bytes to ranks of the same node."""
        flows = sum(flow.calls * (flow.bytes_sent - flow.bytes_between_nodes) for flow in self.flows)
        return flows + sum(each.inside for each in self.compressors.values())

    @property
    def bytes_sent(self) -> int:
        """All bytes, with those of the gradients' norm, which the other properties leave out."""
        return self.inside_nodes + self.between_nodes + (self.plan.shard_ranks - 1) * NORM_BYTES

    @property
    def messages_between_nodes(self) -> int:
        flows = sum(flow.calls * flow.bytes_between_nodes // flow.payload_bytes for flow in self.flows)
        return flows + sum(each.rounds * (self.topology.num_nodes - 1) for each in self.compressors.values())

    @property
    def flops(self) -> float:
        """Operations of one rank."""
        tokens, passes = self.config.step_tokens / self.topology.world_size, self.config.product_passes
        scores = self.config.model.head == "reward"
        return flops_per_token(self.llama, self.config.data.sequence_tokens, passes, scores=scores) * tokens

    def memory(self) -> RankMemory:
        """Cost: runs the model once on the meta device, tens of milliseconds per block."""
        return rank_memory(self.config, self.options, self.llama, self.plan, self.topology)

    def fitting(self, num_bytes: int) -> "StepModel":
        """The same step with as few recomputed blocks as ``num_bytes`` of memory ask; with all, if no number is enough."""
        blocks = len(self.plan.block_modules)
        tried = [replace(self, options=replace(self.options, checkpoint_blocks=n)) for n in range(blocks + 1)]
        if tried[0].memory().most <= num_bytes:  # as usual, and then the other runs of the model are spared
            return tried[0]
        return tried[bisect_left(tried, True, 1, blocks, key=lambda each: each.memory().most <= num_bytes)]

    def on_rank(self, rank: int) -> "StepModel":
        """The same step on another rank."""
        topology = replace(self.topology, rank=rank)
        compressors = _compressors(self.config, self.options, self.plan, topology, self.step)
        return replace(self, topology=topology, compressors=compressors)


def model_step(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, topology: Topology, *, step: int = 0
) -> StepModel:
    """The model of one step of a run on these ranks. ``step``: its number, for compressors whose sparsity rises."""
    shard_ranks = options.sharding.shard_ranks(topology.world_size, topology.num_nodes)
    _, plan = plan_model(config, llama, torch.device("cpu"), shard_ranks)
    flows = step_traffic(
        plan,
        options,
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        accumulation=config.micro_batches(topology.world_size),
        forwards=1 + config.has_reference,
    )
    compressors = _compressors(config, options, plan, topology, step)
    return StepModel(config, options, llama, topology, step, plan, flows, compressors)


def _compressors(
    config: TrainConfig, options: EngineOptions, plan: BucketPlan, topology: Topology, step: int
) -> dict[str, CompressorBytes]:
    replicas = topology.world_size // plan.shard_ranks
    if replicas == 1:
        return {}
    compressor = config.parallel.between
    # Replicas share a node only with sharding none, where every rank is a replica.
    is_whole = options.sharding.shard_over == "self"
    neighbours = topology.ranks_per_node - 1 if is_whole else 0
    shard_rank, replica = (0, topology.rank) if is_whole else (topology.node_rank, topology.node)
    is_one_round = isinstance(compressor, SparseOptions) or (isinstance(compressor, DenseOptions) and replicas == 2)
    found = {}
    for flat_param in plan.trainable:
        shard = cut_shard(flat_param, shard_rank, plan.shard_ranks)
        sent = compressor_bytes(compressor, shard, rank=replica, world_size=replicas, step=step)
        to_neighbours = sent * neighbours // (replicas - 1)
        found[flat_param.name] = CompressorBytes(
            inside=to_neighbours + inside_bytes(compressor, shard, plan.shard_ranks),
            between_nodes=sent - to_neighbours,
            rounds=1 if is_one_round else 2,
        )
    return found


def flops_per_token(config: LlamaConfig, sequence_tokens: int, passes: int = 3, *, scores: bool = False) -> int:
    """Operations per token of forward and backward: 6 N + 12 L H E S, with N parameters in matrix products.

    2 N for each of ``passes``: frozen matrices have no gradients, and adapters' products do not count. Attention counts without
    a mask; recomputation does not count. ``scores``: of a reward model, whose head has one row. Source: PaLM, appendix B (arXiv 2204.02311).
    """
    width = config.num_heads * config.head_dim
    attention = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim)
    products = config.num_layers * (attention + 3 * config.hidden_size * config.mlp_size)
    # The head, tied or not; an embedding lookup has no arithmetic.
    products += (1 if scores else config.vocab_size) * config.hidden_size
    return 2 * passes * products + 12 * config.num_layers * width * sequence_tokens


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak operations per second of one device: the rate of a large matrix product (a small one if it is slow), measured in about 0.2 s on a CPU."""

    def rate(side: int) -> float:
        a, b = (torch.rand(side, side, dtype=dtype, device=device) for _ in range(2))
        seconds = repeat(lambda: torch.mm(a, b).sum().item(), number=1, repeat=9)  # the sum waits for the device
        return 2 * side**3 / min(seconds)  # the fastest try, because other programs slow the rest

    if device.type != "cpu":
        return rate(_GPU_SIDE)
    small = rate(_SMALL_SIDE)
    return rate(_CPU_SIDE) if 2 * _CPU_SIDE**3 / small < _LONGEST_PRODUCT_S else small


def dtype_advice(device: torch.device, dtype: torch.dtype, flops: float) -> Iterator[str]:
    """A sentence if a CPU multiplies float32 clearly faster than ``dtype``, whose rate is ``flops``; none otherwise."""
    if device.type == "cpu" and dtype != torch.float32:
        times_as_fast = peak_flops(device, torch.float32) / flops
        if times_as_fast > 1.5:
            yield f"this CPU multiplies float32 {times_as_fast:.0f} times as fast: use model.compute_dtype=float32"


class Phase(NamedTuple):
    """The steps from one change of sparsity to the next. ``sent_bytes`` of a step; ``sparsity`` None: every element."""

    sparsity: float | None
    sent_bytes: int


def sparse_phases(
    options: DgcOptions | TopKOptions, plan: BucketPlan, replicas: int
) -> tuple[Mapping[int, Phase], int]:
    """Each phase by its first step, and the bytes of a step with dense sums: those that replica 0 sends of shard 0."""
    shards = [cut_shard(flat_param, 0, plan.shard_ranks) for flat_param in plan.trainable]

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
        phase, mend = phases[wasteful[0]], "use parallel.between.kind=dense, or a higher sparsity"
        if useful:
            steps = max(1, options.rampup_begin_step + options.rampup_step - useful[0])
            sparsity = ", ".join(f"{phases[first].sparsity:g}" for first in useful)
            mend = f"make the first {useful[0]} steps dense: rampup_begin_step={useful[0]}, rampup_step={steps}, sparsity=[{sparsity}]"
        yield (
            f"parallel.between sends {format_bytes(phase.sent_bytes)} a step at sparsity {phase.sparsity:g}, and dense sums "
            f"{format_bytes(dense_bytes)}: every one of {replicas} replicas receives the elements of all others; {mend}"
        )
    if replicas > _MOST_REPLICAS:
        yield (
            f"parallel.between.kind={options.kind} has {replicas} replicas, and its bytes grow with their number; above "
            f"{_MOST_REPLICAS} use dense or quantized sums, or a sharding with fewer replicas"
        )
