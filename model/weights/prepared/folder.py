"""Opens a prepared folder: a model split over its ranks, with each rank's packed layers in one file.

    tightwire.json        the manifest
    rank-R-of-N.weights   rank R's blobs, whole pages each: the outer tensors (plain), then each layer (through the
    codec) config.json, tokenizer.json, tokenizer_config.json, ...   as in any Hugging Face folder

``model.prepare`` creates one. The folder does not need the original model.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tightwire.comm.buffers import page_aligned
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.protocols import Moved
from tightwire.kernels.spec.packed_format import PACKED_FORMATS
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.layout import Layout, make_layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.packed_layer import PackedModel, pack_model
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES, BlobFile, read_blob, reads_direct
from tightwire.model.weights.prepared.disk_store import OUTER_NAME, DiskStore, choose_io
from tightwire.model.weights.prepared.manifest import MANIFEST, Manifest, cuts_of, read_manifest

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared folder whose manifest matches the configuration and the files' sizes."""

    folder: Path
    manifest: Manifest
    config: LlamaConfig
    layout: Layout

    @property
    def tp(self) -> int:
        return self.manifest.tp

    @property
    def shares(self) -> tuple[float, ...] | None:
        return self.manifest.shares

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.manifest.dtype)

    @property
    def codec(self) -> Codec:
        return parse_codec(self.manifest.codec)

    @property
    def formats(self) -> WeightFormats:
        packed = {name: PACKED_FORMATS[kind] for name, kind in self.manifest.packed.items()}
        return WeightFormats(packed, self.manifest.plain)

    @property
    def paths(self) -> tuple[Path, ...]:
        """All ranks' files, by rank."""
        return tuple(self.manifest.rank_path(self.folder, rank) for rank in range(self.tp))

    def packed(self, rank: int) -> PackedModel:
        return pack_model(self.config, self.layout.shards[rank], self.formats, self.dtype, self.codec)

    def choose_io(self, asked: str, available_bytes: int) -> str:
        """Resolve ``auto`` to ``direct`` or ``buffered`` for all ranks (``disk_store.choose_io``)."""
        return choose_io(asked, self.paths, available_bytes)

    def store(self, rank: int, io: str = "buffered", *, verify: bool = False, patience_s: float = 1.0) -> DiskStore:
        """Open this rank's file.

        Args:
            io: ``direct`` or ``buffered``; ``choose_io`` resolves ``auto``.
            patience_s: time limit for retries of reads that fail temporarily.
        Raises:
            ValueError: ``io`` is neither.
            WeightsError: the file cannot be opened.
        """
        if io not in ("direct", "buffered"):
            raise ValueError(f"a file is read direct or buffered, got {io!r}; `choose_io` resolves auto")
        return DiskStore(
            self.paths[rank],
            self.packed(rank),
            self.manifest.ranks[rank],
            direct=io == "direct",
            verify=verify,
            patience_s=patience_s,
        )


def open_prepared(folder: Path, config: LlamaConfig) -> Prepared:
    """Check the manifest against the configuration, and the files' sizes against the manifest; reads no weights.

    Raises:
        ModelError: the manifest is damaged, of another version, or does not match the folder.
    """
    manifest = read_manifest(folder)
    try:
        layout = make_layout(config, manifest.tp, manifest.shares)
        prepared = Prepared(folder, manifest, config, layout)
        for rank, written in enumerate(manifest.ranks):
            wanted = [blob.num_bytes for blob in prepared.packed(rank).blobs]
            if written.shard != cuts_of(layout.shards[rank]) or [b.num_bytes for b in written.blobs] != wanted:
                raise ValueError(f"rank {rank}'s part is cut differently")
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: {MANIFEST} does not match config.json and this version of Tightwire: {error}; make the folder again "
            "with `tightwire prepare`"
        ) from None
    for path, written in zip(prepared.paths, manifest.ranks, strict=True):
        _check_size(path, written.num_bytes)
    return prepared


def find_damage(folder: Path, manifest: Manifest, moved: Moved = lambda num_bytes: None) -> Iterator[str]:
    """Read all files, if possible with direct I/O, and compare the checksums. Yields a line per damaged part.

    ``moved`` gets the bytes of the ranks' files as they are read.
    """
    for name, sha256 in sorted(manifest.files.items()):
        path = folder / name
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                yield f"{path}: its checksum differs from the one that was written"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}"
    scratch = page_aligned(PIECE_BYTES, _CPU)
    for rank, written in enumerate(manifest.ranks):
        path = manifest.rank_path(folder, rank)
        try:
            file = BlobFile(path, direct=reads_direct(path), patience_s=0.0)
        except WeightsError as error:
            yield str(error)
            continue
        try:
            file.forget()
            for what, blob in zip(
                [OUTER_NAME, *map("layer {}".format, range(len(written.layers)))], written.blobs, strict=True
            ):
                try:
                    read_blob(file, blob, what, scratch, moved, hashlib.sha256())
                except WeightsError as error:
                    yield str(error)
        finally:
            file.close()


def _check_size(path: Path, num_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}; copy the folder again, or make it again") from None
    if found != num_bytes:
        raise ModelError(
            f"{path}: is {found} bytes long, and {num_bytes} were written; copy the folder again, or make it again with "
            "`tightwire prepare`"
        )
