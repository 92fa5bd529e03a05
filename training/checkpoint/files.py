"""Writes and reads chunks of tensors in the format of torch.distributed.checkpoint, in the same form for every sharding.

Torch makes the plans; the caller exchanges plans and results between ranks. ``Checkpointer`` writes in a background thread while training
continues: only its ``begin`` and ``complete`` communicate with other ranks. The folder gets its final name after all ranks have written. A failed
write leaves earlier checkpoints unchanged.
"""

import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from tightwire.comm.errors import name_ranks
from tightwire.sizes import format_bytes
from tightwire.training.checkpoint.folders import CheckpointError, file_digests, folder_of, partial_of, prune, publish
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import ShardLayout, cut_shard
from tightwire.training.ranks.groups import Control


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """This rank's float32 shard of a flat parameter, (N,) with padding, and the positions of parameters in it."""

    name: str
    flat_N: Tensor
    layout: ShardLayout


class Chunk(NamedTuple):
    """Elements from ``start`` on of the (total,) tensor ``key``; ``numbers`` is 1-D."""

    key: str
    total: int
    start: int
    numbers: Tensor


def flat_shards(engine: Engine) -> list[FlatShard]:
    """This rank's shards of the trainable flat parameters, in the order of the plan."""
    ranks, rank = engine.plan.shard_ranks, engine.shard_rank
    return [
        FlatShard(name=flat_param.name, flat_N=main, layout=cut_shard(flat_param, rank, ranks))
        for flat_param, main in engine.named_flat_params()
    ]


def chunks_of(prefix: str, shard: FlatShard, numbers_N: Tensor) -> Iterator[Chunk]:
    """Views of ``numbers_N``, which has the layout of the shard: one per parameter, with key ``prefix/parameter``."""
    for span in shard.layout.spans:
        if span.num_elems:
            yield Chunk(f"{prefix}/{span.param.name}", span.param.num_elems, span.offset, numbers_N[span.place])


TABLE_OF_CONTENTS = ".metadata"  # torch's name for it


def plan_of(chunks: Sequence[Chunk]) -> SavePlan:
    """The plan of what this rank writes; ``write_chunks`` needs the plans of all ranks."""
    return SavePlan([_write_item(chunk) for chunk in chunks])


def write_chunks(folder: Path, chunks: Sequence[Chunk], plans: Sequence[SavePlan], rank: int) -> list[WriteResult]:
    """Write this rank's file and return its results; ``finish`` needs those of all ranks. Raises OSError: the disk failed."""
    writer = _writer(folder, rank)
    planned, _ = create_default_global_save_plan(list(plans))
    plan = writer.prepare_local_plan(writer.prepare_global_plan(planned)[rank])
    return writer.write_data(plan, _SavePlanner(chunks)).wait()


def finish(folder: Path, plans: Sequence[SavePlan], results: Sequence[list[WriteResult]]) -> None:
    """Write the folder's table of contents, on one rank, after all ranks have written."""
    _, metadata = create_default_global_save_plan(list(plans))
    _writer(folder, 0).finish(metadata, list(results))


def read_chunks(folder: Path, wanted: Sequence[Chunk]) -> None:
    """Fill the tensors of ``wanted`` in place. Raises CheckpointError: a key or file is missing or damaged."""
    try:
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        # _LoadPlanner finds tensors by key and offset, so the chunk numbers inside the read items do not matter.
        items = [item for chunk in wanted for item in _read_items(folder, metadata, chunk)]
        reader.read_data(LoadPlan(items), _LoadPlanner(wanted)).wait()
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error


def keys_in(folder: Path) -> dict[str, int]:
    """The length of each key's flat tensor."""
    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tensor.size.numel() for key, tensor in tensors.items() if isinstance(tensor, TensorStorageMetadata)}


def _writer(folder: Path, rank: int) -> FileSystemWriter:
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # all is in host memory: no CUDA stream to wait for
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    return writer


def _storage_of(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([chunk.start]), torch.Size([chunk.numbers.numel()]))


def _write_item(chunk: Chunk) -> WriteItem:
    properties, size = TensorProperties.create_from_tensor(chunk.numbers), torch.Size([chunk.total])
    data = TensorWriteData(chunk=_storage_of(chunk), properties=properties, size=size)
    return WriteItem(index=MetadataIndex(chunk.key, [chunk.start]), type=WriteItemType.SHARD, tensor_data=data)


def _read_items(folder: Path, metadata: Metadata, chunk: Chunk) -> list[ReadItem]:
    saved = metadata.state_dict_metadata.get(chunk.key)
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: has no {chunk.key}; it is of another model or optimizer")
    if saved.size.numel() != chunk.total:
        raise CheckpointError(
            f"{folder}: {chunk.key} has {saved.size.numel()} elements, but this model has {chunk.total}; it is of another model"
        )
    return create_read_items_for_chunk_list(chunk.key, saved, [_storage_of(chunk)])


class _Places:
    """The tensors of chunks, by key and first element."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._numbers = {(chunk.key, chunk.start): chunk.numbers.detach() for chunk in chunks}


class _SavePlanner(_Places, DefaultSavePlanner):
    """Gives the writer the tensor of each planned item."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        # Torch saves the whole storage of a tensor, so a view is cloned.
        numbers = self._numbers[write_item.index.fqn, write_item.index.offset[0]]
        return numbers if numbers.untyped_storage().nbytes() == numbers.nbytes else numbers.clone()


class _LoadPlanner(_Places, DefaultLoadPlanner):
    """Gives the reader the destination of each read item, a view, so the reader fills it."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        numbers = self._numbers[read_item.dest_index.fqn, read_item.dest_index.offset[0]]
        return numbers[read_item.dest_offsets[0] : read_item.dest_offsets[0] + read_item.lengths[0]]


class Completed(NamedTuple):
    """What became of a checkpoint. ``error``: why it was not published; ``warning``: why old ones were not removed."""

    folder: Path
    error: str
    warning: str


class _Written(NamedTuple):
    """One rank's file of a checkpoint."""

    results: list[WriteResult]
    digests: dict[str, int]
    error: str


class _Write(NamedTuple):
    """A checkpoint that is being written."""

    folder: Path
    plans: Sequence[SavePlan]
    description: Mapping[str, Any]
    own: "Future[_Written]"


_LOOK_S, _SAY_S = 1.0, 60.0  # a slow disk: no rank waits for another in one collective


class Checkpointer:
    """Writes the checkpoints of one run; all ranks call ``begin`` and ``complete`` at the same steps."""

    def __init__(self, run: Path, control: Control, *, keep: int) -> None:
        self._run, self._control, self._keep = run, control, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write: _Write | None = None

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is not completed."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether this rank's file is written or has failed."""
        return self._write is not None and self._write.own.done()

    def begin(self, step: int, chunks: Sequence[Chunk], description: Mapping[str, Any]) -> None:
        """Start to write this rank's ``chunks`` in a thread. Collective. The previous checkpoint must be completed."""
        assert self._write is None, "the previous checkpoint is not completed"
        folder, plans = folder_of(self._run, step), self._control.gather(plan_of(chunks))
        own = self._thread.submit(_write_file, partial_of(folder), chunks, plans, self._control.rank)
        self._write = _Write(folder, plans, description, own)

    def complete(self, say: Callable[[str], None]) -> Completed:
        """Wait for all ranks, telling ``say`` which still write; publish the checkpoint and remove old ones. Collective."""
        write, self._write = self._write, None
        assert write is not None, "no checkpoint has begun"
        next_s = time.monotonic() + _SAY_S
        while late := [rank for rank, (done,) in enumerate(self._control.gather_numbers(write.own.done())) if not done]:
            wait([write.own], _LOOK_S)
            if time.monotonic() > next_s:
                next_s += _SAY_S
                say(f"waiting for {name_ranks(late)} to write {write.folder.name}")
        ranks: list[_Written] = self._control.gather(write.own.result())
        errors, warning = [f"rank {rank}: {own.error}" for rank, own in enumerate(ranks) if own.error], ""
        if self._control.rank == 0:
            partial = partial_of(write.folder)
            try:
                if not errors:
                    finish(partial, write.plans, [own.results for own in ranks])
                    digests = {name: crc for own in ranks for name, crc in own.digests.items()}
                    digests |= file_digests(partial, [TABLE_OF_CONTENTS])
                    publish(partial, write.folder, {**write.description, "digests": digests})
            except OSError as error:
                errors.append(f"rank 0: {error}")
            if errors:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                try:
                    prune(self._run, self._keep)
                except OSError as error:
                    warning = f"checkpoints older than the newest {self._keep} could not be removed: {error}"
        errors, warning = self._control.gather((errors, warning))[0]
        return Completed(write.folder, "; ".join(errors), warning)


def _write_file(folder: Path, chunks: Sequence[Chunk], plans: Sequence[SavePlan], rank: int) -> _Written:
    try:
        results = write_chunks(folder, chunks, plans, rank)
        return _Written(results, file_digests(folder, {result.storage_data.relative_path for result in results}), "")
    except Exception as error:  # noqa: BLE001, ``complete`` reports any failure on all ranks
        # Torch's error for a full disk may not say so, so the message includes the free space.
        free = format_bytes(shutil.disk_usage(folder.parent).free)
        return _Written([], {}, f"{folder.name}: {error} ({free} free on that disk)")
