"""Writes and reads pieces in the format of torch.distributed.checkpoint; reading may use another sharding than writing.

Torch makes the plans. The caller exchanges plans and results between ranks, so no default process group is needed and
the writing thread waits for no other rank. A reader that uses torch alone sees one flat tensor per key.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path

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
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from tightwire.training.checkpoint.pieces import SavedPiece

TABLE_OF_CONTENTS = ".metadata"  # torch's name for it


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged."""


def plan_of(pieces: Sequence[SavedPiece]) -> SavePlan:
    """The plan of what this rank writes; ``write_pieces`` needs the plans of all ranks."""
    return SavePlan([_write_item(piece) for piece in pieces])


def write_pieces(folder: Path, pieces: Sequence[SavedPiece], plans: Sequence[SavePlan], rank: int) -> list[WriteResult]:
    """Write this rank's file and return its results; ``finish`` needs those of all ranks. Not collective.

    Raises:
        OSError: the disk reported an error.
    """
    writer = _writer(folder, rank)
    planned, _ = create_default_global_save_plan(list(plans))
    plan = writer.prepare_local_plan(writer.prepare_global_plan(planned)[rank])
    return writer.write_data(plan, _SavePlanner(pieces)).wait()


def finish(folder: Path, plans: Sequence[SavePlan], results: Sequence[list[WriteResult]]) -> None:
    """Write the folder's table of contents, on one rank, after all ranks have written."""
    _, metadata = create_default_global_save_plan(list(plans))
    _writer(folder, 0).finish(metadata, list(results))


def read_pieces(folder: Path, wanted: Sequence[SavedPiece]) -> None:
    """Fill the tensors of ``wanted`` in place. Not collective.

    Raises:
        CheckpointError: a key is missing or has another length, or a file cannot be read.
    """
    try:
        reader = FileSystemReader(folder)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        # _LoadPlanner finds tensors by key and offset, so the chunk numbers inside the read items do not matter.
        items = [item for piece in wanted for item in _read_items(folder, metadata, piece)]
        reader.read_data(LoadPlan(items), _LoadPlanner(wanted)).wait()
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error


def files_of(results: Sequence[WriteResult]) -> set[str]:
    """The names of the files in a rank's results."""
    return {result.storage_data.relative_path for result in results}


def keys_in(folder: Path) -> dict[str, int]:
    """The length of each key's flat tensor."""
    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tensor.size.numel() for key, tensor in tensors.items() if isinstance(tensor, TensorStorageMetadata)}


def _writer(folder: Path, rank: int) -> FileSystemWriter:
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    return writer


def _chunk(piece: SavedPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([piece.start]), torch.Size([piece.numbers.numel()]))


def _write_item(piece: SavedPiece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, [piece.start]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties.create_from_tensor(piece.numbers),
            size=torch.Size([piece.total]),
        ),
    )


def _read_items(folder: Path, metadata: Metadata, piece: SavedPiece) -> list[ReadItem]:
    saved = metadata.state_dict_metadata.get(piece.key)
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: holds no {piece.key}; it is of another model or optimizer")
    if saved.size.numel() != piece.total:
        raise CheckpointError(
            f"{folder}: {piece.key} has {saved.size.numel()} elements there and {piece.total} here; it is of another model"
        )
    return create_read_items_for_chunk_list(piece.key, saved, [_chunk(piece)])


class _SavePlanner(DefaultSavePlanner):
    """Gives the writer the tensor of each planned item."""

    def __init__(self, pieces: Sequence[SavedPiece]) -> None:
        super().__init__()
        self._numbers = {(piece.key, piece.start): piece.numbers for piece in pieces}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        # Torch saves the whole storage of a tensor, so a view is cloned.
        numbers = self._numbers[write_item.index.fqn, write_item.index.offset[0]].detach()
        return numbers if numbers.untyped_storage().nbytes() == numbers.nbytes else numbers.clone()


class _LoadPlanner(DefaultLoadPlanner):
    """Gives the reader the destination of each read item."""

    def __init__(self, pieces: Sequence[SavedPiece]) -> None:
        super().__init__()
        self._numbers = {(piece.key, piece.start): piece.numbers for piece in pieces}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        numbers = self._numbers[read_item.dest_index.fqn, read_item.dest_index.offset[0]].detach()
        return numbers[read_item.dest_offsets[0] : read_item.dest_offsets[0] + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing: ``resolve_tensor`` returned a view of the destination, so the reader has filled it."""
