"""Writes and reads chunks of tensors in the format of torch.distributed.checkpoint, in the same form for every sharding.

Torch makes the plans; the caller exchanges plans and results between ranks, so the writing thread waits for no other rank.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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

from tightwire.training.checkpoint.folders import CheckpointError
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import ShardLayout, cut_shard


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
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    return writer


def _chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([chunk.start]), torch.Size([chunk.numbers.numel()]))


def _by_place(chunks: Sequence[Chunk]) -> dict[tuple[str, int], Tensor]:
    return {(chunk.key, chunk.start): chunk.numbers.detach() for chunk in chunks}


def _write_item(chunk: Chunk) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(chunk.key, [chunk.start]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(chunk),
            properties=TensorProperties.create_from_tensor(chunk.numbers),
            size=torch.Size([chunk.total]),
        ),
    )


def _read_items(folder: Path, metadata: Metadata, chunk: Chunk) -> list[ReadItem]:
    saved = metadata.state_dict_metadata.get(chunk.key)
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: has no {chunk.key}; it is of another model or optimizer")
    if saved.size.numel() != chunk.total:
        raise CheckpointError(
            f"{folder}: {chunk.key} has {saved.size.numel()} elements, but this model has {chunk.total}; it is of another model"
        )
    return create_read_items_for_chunk_list(chunk.key, saved, [_chunk(chunk)])


class _SavePlanner(DefaultSavePlanner):
    """Gives the writer the tensor of each planned item."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._numbers = _by_place(chunks)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        # Torch saves the whole storage of a tensor, so a view is cloned.
        numbers = self._numbers[write_item.index.fqn, write_item.index.offset[0]]
        return numbers if numbers.untyped_storage().nbytes() == numbers.nbytes else numbers.clone()


class _LoadPlanner(DefaultLoadPlanner):
    """Gives the reader the destination of each read item."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._numbers = _by_place(chunks)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        numbers = self._numbers[read_item.dest_index.fqn, read_item.dest_index.offset[0]]
        return numbers[read_item.dest_offsets[0] : read_item.dest_offsets[0] + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: ``resolve_tensor`` returned a view of the destination, so the reader has filled it."""
