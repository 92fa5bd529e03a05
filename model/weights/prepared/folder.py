"""A prepared folder, opened: a model already cut for its ranks, each rank's layers as images in one file.

    tightwire.json        the manifest
    rank-R-of-N.weights   rank R's images, whole pages each: the outer tensors (plain), then layer after layer (through the codec)
    config.json, tokenizer.json, tokenizer_config.json, ...   as in any Hugging Face folder

``model.prepare`` makes one. It needs nothing of the model that it was made from.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.kernels.spec.packed_format import PACKED_FORMATS
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.layout import Layout, Shard, make_layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import layer_tensors, outer_tensors
from tightwire.model.weights.image import Image, layer_on_device, make_image
from tightwire.model.weights.layer_store import LayerStore, Moved
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES, BlobFile, read_blob, reads_direct
from tightwire.model.weights.prepared.disk_store import DiskStore, choose_io
from tightwire.model.weights.prepared.manifest import MANIFEST, Manifest, cuts_of, read_manifest
from tightwire.model.weights.source import LayerWeights, OuterWeights

_CPU = torch.device("cpu")
_OUTER = "embedding, norm and head"


@dataclass(frozen=True, slots=True)
class RankImages:
    """How one rank's tensors lie in its file."""

    outer: Image
    plain: tuple[Image, ...]  # of each layer, as the kernels read it
    stored: tuple[Image, ...]  # of each layer, as the file has it

    @property
    def blobs(self) -> tuple[Image, ...]:
        """In the file's order."""
        return self.outer, *self.stored


def rank_images(
    config: LlamaConfig, shard: Shard, formats: WeightFormats, dtype: torch.dtype, codec: Codec
) -> RankImages:
    """What is read once stays plain: a codec would cost the embedding and the head accuracy and spare no pass a byte."""
    layers = [layer_tensors(config, shard, index) for index in range(config.num_layers)]
    plain = tuple(make_image(tensors, formats, dtype) for tensors in layers)
    stored = plain if codec.exact else tuple(make_image(tensors, formats, dtype, codec) for tensors in layers)
    return RankImages(make_image(outer_tensors(config, shard), formats, dtype), plain, stored)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the manifest says, checked against the configuration and the files' sizes."""

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
        """Of all ranks' files, in their order."""
        return tuple(self.manifest.rank_path(self.folder, rank) for rank in range(self.tp))

    def images(self, rank: int) -> RankImages:
        return rank_images(self.config, self.layout.shards[rank], self.formats, self.dtype, self.codec)

    def choose_io(self, asked: str, available_bytes: int) -> str:
        """``direct`` or ``buffered``, for all ranks (``disk_store.choose_io``)."""
        return choose_io(asked, self.paths, available_bytes)

    def store(self, rank: int, io: str = "buffered", *, verify: bool = False, patience_s: float = 1.0) -> DiskStore:
        """This rank's layers.

        Args:
            io: ``direct`` or ``buffered``; ``choose_io`` settles ``auto``.
            patience_s: for how long a read that may go better is tried again.
        Raises:
            ValueError: ``io`` is not settled.
            WeightsError: the file cannot be opened.
        """
        if io not in ("direct", "buffered"):
            raise ValueError(f"a store reads direct or buffered, got {io!r}; `choose_io` settles auto")
        layers = self.manifest.ranks[rank].layers
        return DiskStore(
            self.paths[rank],
            self.images(rank).stored,
            layers,
            direct=io == "direct",
            verify=verify,
            patience_s=patience_s,
        )

    def load_outer(
        self,
        rank: int,
        device: torch.device,
        *,
        verify: bool = False,
        moved: Moved = lambda num_bytes: None,
    ) -> OuterWeights:
        """Read what stands before and after the layers.

        Raises:
            WeightsError: it cannot be read, or with ``verify`` is not what was written.
        Cost: its image's bytes on ``device``, and for a while on the host.
        """
        buffer = self.read_outer(rank, verify=verify, moved=moved)
        return OuterWeights.of(self.images(rank).outer.tensors(buffer.to(device)))

    def read_outer(self, rank: int, *, verify: bool = False, moved: Moved = lambda num_bytes: None) -> Tensor:
        """(image bytes,) uint8 on the host: the same as it lies in the file. Raises as ``load_outer`` does."""
        blob = self.manifest.ranks[rank].outer
        buffer = page_aligned(blob.num_bytes, _CPU)
        file = BlobFile(self.paths[rank], direct=False)
        try:
            digest = hashlib.sha256() if verify else None
            read_blob(file, blob, _OUTER, buffer, moved, digest)
        finally:
            file.close()
        return buffer


def load_layer(
    store: LayerStore, layer: int, plain: Image, device: torch.device, moved: Moved = lambda num_bytes: None
) -> LayerWeights:
    """A layer out of a store, to be kept on ``device``.

    Args:
        plain: how it is to lie there.
    Raises:
        WeightsError: it cannot be had.
    Cost: the plain image's bytes on ``device``, and the stored one's for a while on the host.
    """
    image = store.image(layer)
    buffer = page_aligned(image.num_bytes, _CPU)
    source = store.read(layer, buffer, moved)
    if image.is_plain and source.data_ptr() != buffer.data_ptr():
        source = source.clone()  # memory of the store's own is not ours to keep
    return layer_on_device(image, plain, source, device)


def open_prepared(folder: Path, config: LlamaConfig) -> Prepared:
    """Check the manifest against the configuration, and the files' sizes against the manifest; reads no weights.

    Raises:
        ModelError: the manifest is damaged or of another version, or something is not as it says.
    """
    manifest = read_manifest(folder)
    try:
        layout = make_layout(config, manifest.tp, manifest.shares)
        prepared = Prepared(folder, manifest, config, layout)
        for rank, written in enumerate(manifest.ranks):
            wanted = [image.num_bytes for image in prepared.images(rank).blobs]
            if written.shard != cuts_of(layout.shards[rank]) or [b.num_bytes for b in written.blobs] != wanted:
                raise ValueError(f"rank {rank}'s part is cut otherwise")
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: {MANIFEST} does not go with config.json and this version of Tightwire: {error}; make the folder anew "
            "with `tightwire prepare`"
        ) from None
    for path, written in zip(prepared.paths, manifest.ranks, strict=True):
        _check_size(path, written.num_bytes)
    return prepared


def find_damage(folder: Path, manifest: Manifest, moved: Moved = lambda num_bytes: None) -> Iterator[str]:
    """Read everything and compare it with its checksum, from the disk itself where that can be had; a line for each damage.

    ``moved`` is told the bytes of the ranks' files as they are read.
    """
    for name, sha256 in sorted(manifest.files.items()):
        path = folder / name
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                yield f"{path}: is not what was written: its checksum is another"
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
                [_OUTER, *map("layer {}".format, range(len(written.layers)))], written.blobs, strict=True
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
        raise ModelError(f"{path}: cannot be read: {error.strerror}; copy the folder again, or make it anew") from None
    if found != num_bytes:
        raise ModelError(
            f"{path}: is {found} bytes long, and {num_bytes} were written; copy the folder again, or make it anew with "
            "`tightwire prepare`"
        )
