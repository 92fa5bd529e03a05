"""One rank of the engine that answers inside a trainer: its weights, of which what the trainer has in memory is not held twice.

``SharedWeights`` uses the frozen matrices of flat parameters that one rank has whole, as kernels read them: packed blocks, or numbers
in the computing dtype. ``GatheredLayers`` gathers the flat parameters that several ranks have in parts, each time a layer is used. Norms, biases and the rest
are read from the checkpoint.
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tightwire.buffers import page_aligned
from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.self_test import self_test
from tightwire.comm.codec.codec import NONE
from tightwire.comm.group.group import Group
from tightwire.comm.ledger.ledger import Spent
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.protocols import Moved
from tightwire.kernels.spec.gguf_blocks import PackedFormat
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight
from tightwire.large_file import PAGE_BYTES
from tightwire.model.adapters.product import AdapterRoom
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.checkpoint.tensors import StackedParts
from tightwire.model.layout import Shard
from tightwire.model.step import StepPlan
from tightwire.model.weights import EVERYTHING_RESIDENT, LEAST_STREAMED, WeightPlan
from tightwire.model.weights.formats import (
    Fused,
    WeightFormats,
    choose_formats,
    layer_tensors,
    outer_tensors,
    read_tensors,
    split_model,
)
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel, Place, pack_tensors
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.config.limits import Limits
from tightwire.server.ipc.engine_stats import RankCounts
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.engine import Engine as TrainingEngine
from tightwire.training.engine.flat_parameters import ENDS
from tightwire.training.engine.gathered_weights import gather_shard, room_bytes
from tightwire.training.engine.shards import FrozenShard, Shards, group_of
from tightwire.training.ranks.groups import shard_group
from tightwire.training.start.model import StartingModel

NUM_VERSIONS = 2  # of the adapter
_GLANCE_S = 0.001
# A step of a rank that has answered its prompts.
_NOTHING = StepPlan(
    index=0, token_ids=b"", query_lens=b"", context_lens=b"", block_tables=b"", num_decode_rows=0, logit_rows=b""
)


def whole_matrices(frozen: Collection[FrozenShard]) -> dict[str, Matrix]:
    """The trainer's matrices that this rank has whole and as kernels read them, by their names in the model: views."""
    found: dict[str, Matrix] = {}
    for shard in frozen:
        own, numbers_N = shard.flat_param, shard.computable()
        if shard.form.ranks.world_size > 1:
            continue
        if own.blocks is not None:
            places = zip(own.blocks.params, own.formats, strict=True)
            found |= {place.name: PackedMatrix(place.of(shard.wire()), packed) for place, packed in places}
        elif numbers_N is not None:
            found |= {param.name: param.of(numbers_N) for param in own.params if len(param.shape) == 2}
    return found


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """An engine's weights in ``formats``, plain ones in ``dtype``; ``whole`` has matrices in memory, by their names in the model."""

    config: LlamaConfig
    formats: WeightFormats
    dtype: torch.dtype
    whole: Mapping[str, Matrix]

    def files(self, reader: CheckpointReader, shard: Shard) -> CheckpointStore:
        """What reads the others. ``shard``: this rank's."""
        layers = [layer_tensors(self.config, shard, layer) for layer in range(self.config.num_layers)]
        outer, *plain = map(self._layer, [outer_tensors(self.config, shard), *layers])
        return CheckpointStore(reader, self.config, shard, PackedModel(outer, tuple(plain), tuple(plain)))

    def _layer(self, tensors: Mapping[str, Fused]) -> PackedLayer:
        held = {name: own for name, fused in tensors.items() if (own := self.find(fused)) is not None}
        read = {name: fused for name, fused in tensors.items() if name not in held}
        return replace(pack_tensors(read, self.formats, self.dtype), held=held)

    def find(self, fused: Fused) -> Weight | None:
        """The matrix in memory, if it is there as the engine would read it; parts of one format follow each other."""
        runs, stacked = list[Matrix](), StackedParts(self.config)
        for name, rows in fused.parts:
            stored, place = stacked.find(name)
            if (matrix := self.whole.get(stored)) is None or fused.columns != range(matrix.shape[1]):
                return None
            first = rows.start + (place.start if place else 0)
            last = first + len(rows)
            part = matrix[first:last] if isinstance(matrix, Tensor) else matrix.rows(first, last)
            joined = _joined(runs[-1], part) if runs else None
            runs = [*runs, part] if joined is None else [*runs[:-1], joined]
        packed = tuple(run for run in runs if isinstance(run, PackedMatrix))
        if self.formats.of(fused) != tuple((run.shape[0], run.format) for run in packed):
            return None
        if packed:
            return packed[0] if len(packed) == 1 else StackedMatrix(packed)
        return runs[0] if len(runs) == 1 and isinstance(runs[0], Tensor) and runs[0].dtype == self.dtype else None


def _joined(first: Matrix, second: Matrix) -> Matrix | None:
    """Both as one matrix, if the second's rows follow the first's in memory."""
    if isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix):
        blocks_OB = _joined(first.blocks_OB, second.blocks_OB) if first.format == second.format else None
        return PackedMatrix(blocks_OB, first.format) if isinstance(blocks_OB, Tensor) else None
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape[1] != second.shape[1]:
        return None
    of_one_memory = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not of_one_memory or second.data_ptr() != first.data_ptr() + first.nbytes:
        return None
    return first.as_strided((len(first) + len(second), first.shape[1]), first.stride())


Parts = Sequence[Sequence[FrozenShard]]  # of embedding and head together, then of each layer


def find_parts(trainer: TrainingEngine) -> Parts:
    """This rank's parts of the frozen matrices; nothing if it has them whole. Raises ValueError: a bucket has several layers, or all fit
    into the buffers."""
    ends = [bucket for bucket in trainer.plan.buckets if bucket.name in ENDS]
    found: list[list[FrozenShard]] = []
    for buckets in (ends, *([bucket] for bucket in trainer.plan.blocks)):
        names = [each.name for bucket in buckets for each in bucket.flat_params if not each.trainable]
        found.append([trainer.frozen_shards[name] for name in names])
    if all(shard.form.ranks.world_size == 1 for own in found for shard in own):
        return []
    if trainer.plan.per_bucket > 1:
        raise ValueError(
            "rollout.weights=partition gathers a layer when it is computed, and parallel.blocks_per_bucket="
            f"{trainer.plan.per_bucket} keeps several together; leave out one of them"
        )
    if len(trainer.plan.blocks) < LEAST_STREAMED:
        raise ValueError(f"rollout.weights=partition needs a model of {LEAST_STREAMED} layers or more; leave it out")
    return found


def formats_of_parts(formats: WeightFormats, config: LlamaConfig, parts: Parts) -> WeightFormats:
    """``formats`` of the checkpoint, but only the blocks that the trainer keeps are packed."""
    stacked, every = StackedParts(config), (part.flat_param for own in parts for part in own)
    kept = {param.name for flat_param in every if flat_param.blocks for param in flat_param.params}
    packed = {name: own for name, own in formats.packed.items() if stacked.find(name)[0] in kept}
    return WeightFormats(packed, formats.plain)


class _Span(NamedTuple):
    """A matrix's bytes in a gathered layer. ``format``: of its blocks; None: it is numbers."""

    start: int
    row_bytes: int
    format: PackedFormat | None


class GatheredLayers(CheckpointStore):
    """The layers of an engine whose frozen matrices the trainer's ranks have in parts: a read gathers them, as the trainer does.

    All ranks that have parts read the same layers in the same order. Cost of a read: the trainer's gather of the block. Memory: norms and
    biases, and room for a layer's encoded bytes. Embedding and head are gathered once.
    """

    def __init__(
        self, reader: CheckpointReader, shard: Shard, shared: SharedWeights, parts: Parts, groups: tuple[Group, Group]
    ) -> None:
        """``shard``: a whole model. ``groups``: a lane group, and the ranks of it that have parts.

        Raises ValueError: a layer has a matrix in another form than the engine reads it.
        """
        self._parts, self._dtype, self._groups = parts, shared.dtype, groups
        config = shared.config
        tensors = outer_tensors(config, shard), *(layer_tensors(config, shard, n) for n in range(config.num_layers))
        outer, *plain = (self._lay_out(reader, shared, *each) for each in zip(tensors, parts, strict=True))
        super().__init__(reader, config, shard, PackedModel(outer, tuple(plain), tuple(plain)))
        self.name, self.device = "the ranks that train", groups[0].device
        self._room = self._make_room(parts[1:])

    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        into = page_aligned(self.model.outer.num_bytes, device)
        self._gather(self._parts[0], into, moved, self._make_room(self._parts[:1]))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # another stream gathers from here on
        return into

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        return self._gather(self._parts[1 + layer], into, moved, self._room)

    def _make_room(self, parts: Parts) -> Tensor:
        own = Shards({}, {part.flat_param.name: part for each in parts for part in each})
        return torch.empty(room_bytes(own), dtype=torch.uint8, device=self._groups[0].device)

    def _gather(self, parts: Sequence[FrozenShard], into: Tensor, moved: Moved, room: Tensor) -> Tensor:
        end = 0
        for part in parts:
            start, end = end, end + self._num_bytes(part)
            out = into[start:end] if part.flat_param.blocks else into[start:end].view(self._dtype)
            gather_shard(part, *self._groups, out, room)
            moved(end - start)
        return into

    def _num_bytes(self, part: FrozenShard) -> int:
        """Bytes of the gathered flat parameter."""
        own = part.flat_param
        return own.blocks.num_elems if own.blocks else own.num_elems * self._dtype.itemsize

    def _lay_out(
        self,
        reader: CheckpointReader,
        shared: SharedWeights,
        tensors: Mapping[str, Fused],
        parts: Sequence[FrozenShard],
    ) -> PackedLayer:
        spans, end = dict[str, _Span](), 0
        for part in parts:
            own, size = part.flat_param, self._dtype.itemsize
            if own.blocks is not None:
                placed = zip(own.blocks.params, own.formats, strict=True)
                spans |= {place.name: _Span(end + place.start, place.shape[1], packed) for place, packed in placed}
            else:
                spans |= {p.name: _Span(end + p.start * size, p.shape[1] * size, None) for p in own.params}
            end += self._num_bytes(part)
        vectors = {name: fused for name, fused in tensors.items() if fused.columns is None}
        beside = pack_tensors(vectors, shared.formats, shared.dtype)
        held = beside.tensors(torch.zeros(beside.num_bytes, dtype=torch.uint8, device=self._groups[0].device))
        read_tensors(reader, vectors, held)
        stacked = StackedParts(shared.config)
        places = {name: _place(spans, fused, shared, stacked) for name, fused in tensors.items() if name not in vectors}
        return PackedLayer(places, shared.dtype, -(-end // PAGE_BYTES) * PAGE_BYTES, held)


def _place(spans: Mapping[str, _Span], fused: Fused, shared: SharedWeights, stacked: StackedParts) -> Place:
    """Where a gathered layer has ``fused``, whose parts follow each other. Raises ValueError: they do not, or have another form."""
    found: list[range] = []
    for name, rows in fused.parts:
        stored, inside = stacked.find(name)
        span = spans.get(stored)
        if span is not None and span.format == shared.formats.packed.get(name):
            first = span.start + (rows.start + (inside.start if inside else 0)) * span.row_bytes
            found.append(range(first, first + len(rows) * span.row_bytes))
    if len(found) < len(fused.parts) or any(one.stop != other.start for one, other in pairwise(found)):
        raise ValueError(
            f"the engine reads {', '.join(fused.names)} in one form and one place, which the trainer's parts do not have; leave out "
            "rollout.weights=partition"
        )
    return Place(found[0].start, sum(map(len, found)), fused.shape, shared.formats.of(fused), NONE)


class OneRank:
    """The ranks of the engine (a ``StepRunner``): this one. The others plan and choose the same, or answer their own prompts.

    ``parts``: of layers that it gathers. ``num_passes``: through the layers, so far.
    """

    def __init__(
        self,
        start: StartingModel,
        config: TrainConfig,
        group: Group,
        limits: Limits,
        trainer: TrainingEngine | None,
    ) -> None:
        formats, dtype = choose_formats(start.reader, start.config, "auto"), getattr(torch, config.model.compute_dtype)
        frozen = () if trainer is None else trainer.frozen_shards.values()
        self.parts = find_parts(trainer) if trainer and config.rollout.weights == "partition" else []
        if self.parts:
            formats = formats_of_parts(formats, start.config, self.parts)
        layout = split_model(start.config, formats, group.world_size)
        whole = whole_matrices(frozen) if group.world_size == 1 else {}
        shared = SharedWeights(start.config, formats, dtype, whole)
        files, plan = shared.files(start.reader, layout.shards[group.rank]), EVERYTHING_RESIDENT
        if self.parts and trainer is not None:
            lane = trainer.groups.gather
            groups = lane, sharing(trainer, lane, self.parts)
            files = GatheredLayers(start.reader, layout.shards[0], shared, self.parts, groups)
            plan = WeightPlan(source="stream", origin="disk", streamed=tuple(range(start.config.num_layers)))
        self.num_passes = 0
        self.runner = build_runner(
            start.config,
            files,
            layout,
            RankGroups(group, _routes(config, start.config, group, limits)),
            RunnerOptions(
                dtype=dtype,
                max_model_len=limits.max_model_len,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                groups=limits.groups,
                formats=formats,
                weight_plan=plan,
                fetch_timeout_s=math.inf,  # a gather has its own
                graphs_up_to=limits.max_num_seqs,
                fuses=False,  # a run that goes on has the bits of one that was not stopped
                adapters=AdapterRoom(NUM_VERSIONS, start.lora.rank) if start.lora else None,
            ),
        )
        self.runner.lockstep = bool(self.parts)
        self._vocab_size = start.tokenizer.vocab_size
        self.num_top, self._top = 0, (np.empty((0, 0)), np.empty((0, 0)))  # of one rank alone, which has all logits

    def broadcast(self, plans: Sequence[Any]) -> None:
        """Every rank has the plans."""

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        self.num_passes += 1
        return self.runner.execute(plan, chosen_R)

    def choose(self, plans: Sequence[Any], logits_RV: Any, banned: Sequence[bytes]) -> Any:
        if self.num_top:  # some times faster than the server's scores, which have ranks too
            logits_RV[:, self._vocab_size :] = -torch.inf  # padding, which the model that learns may not have
            top = logits_RV.topk(min(self.num_top, self._vocab_size))
            logs_RK = top.values - logits_RV.logsumexp(1, keepdim=True)
            self._top = top.indices.cpu().numpy(), logs_RK.cpu().numpy()
        return self.runner.choose(plans[0], logits_RV, banned[0])

    def take_top(self) -> tuple[np.ndarray, np.ndarray]:
        """(R, K) the most likely tokens of the newest step's rows of logits and their log-probabilities; each only once."""
        taken, self._top = self._top, (self._top[0][:0], self._top[1][:0])
        return taken

    def step_tokens(self) -> None:
        return None

    def comm_spent(self) -> Spent:
        return Spent()

    def counts(self) -> RankCounts:
        return RankCounts()

    def pass_layers(self) -> None:
        """Gather all layers, as the ranks do that compute with them."""
        self.execute(_NOTHING)

    def settle(self) -> None:
        """Wait until layers of the next pass are gathered as far as there is room: then nothing uses the gather lane's group."""
        weights = self.runner.weights
        assert isinstance(weights, StreamedWeights)
        while not weights.fetcher.is_full:
            weights.fetcher.pool.check_open()
            time.sleep(_GLANCE_S)


def sharing(trainer: TrainingEngine, lane: Group, parts: Parts) -> Group:
    """The ranks of a lane group that have the other parts."""
    return group_of(parts[0][0].form, shard_group(lane, trainer.options.sharding))


def _routes(config: TrainConfig, model: LlamaConfig, group: Group, limits: Limits) -> Routes | None:
    """The AllReduces of the ranks' sums, chosen as for a server and tested. Raises ValueError: one sums wrongly. None: there is one rank."""
    if group.world_size == 1:
        return None
    device = group.device.type
    dtype = config.model.compute_dtype if device == "cuda" else "float32"  # of the messages
    num_nodes = 1 if group.nodes is None else group.nodes.across.world_size
    transport = "process-group" if group.transport.fused is None else "shared-memory"
    setting = Setting(transport, device, group.world_size, num_nodes, dtype)
    request = PolicyRequest(
        row_elems=model.hidden_size,
        max_rows=limits.max_num_batched_tokens,
        max_decode_rows=limits.max_num_seqs,
        num_layers=model.num_layers,
        allreduce=config.rollout.allreduce,
        decode=config.rollout.allreduce_decode,
    )
    policy = Chooser(request, CostModel(setting)).policy()
    candidates = make_candidates([policy], group)
    sizes = {"row_elems": model.hidden_size, "max_rows": limits.max_num_batched_tokens}
    verdicts = self_test(group, candidates, **sizes, dtype=getattr(torch, dtype))
    wrong = {verdict.algorithm: verdict.detail for verdict in verdicts if not verdict.ok}
    return Routes([("rollout", policy.without(wrong))], candidates)
