"""Opens a prepared folder: a model split over its ranks, with each rank's packed layers in one file.

``tightwire.json`` is the manifest. ``rank-R-of-N.weights`` has rank R's blobs, whole pages each: the outer tensors
(plain), then each layer (through the codec). The other files are those of any Hugging Face folder.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightwire.buffers import page_aligned
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.protocols import Moved
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.large_file import PIECE_BYTES, DamagedFileError, LargeFile, UnreadableFileError, reads_direct
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.layout import Layout
from tightwire.model.weights.formats import WeightFormats, split_model
from tightwire.model.weights.packed_layer import LayerFiles, PackedModel, pack_model
from tightwire.model.weights.prepared.manifest import MAKE_AGAIN, MANIFEST, Manifest, RankFile, cuts_of, read_manifest

_CPU = torch.device("cpu")
_OUTER = "embedding, norm and head"


@contextmanager
def _weights_errors() -> Iterator[None]:
    """Convert the errors of a rank's file to WeightsError, with advice."""
    try:
        yield
    except DamagedFileError as error:
        raise WeightsError(f"{error}; {MAKE_AGAIN}") from None
    except UnreadableFileError as error:
        raise WeightsError(f"{error}; check the folder with `tightwire prepare --check` and the kernel's log") from None


class DiskStore(LayerFiles):
    """``LayerFiles`` over one file. The first read of each part also compares its checksum."""

    def __init__(
        self, path: Path, model: PackedModel, blobs: RankFile, *, direct: bool, patience_s: float = 1.0
    ) -> None:
        """``model``: the forms of the tensors in the file. ``direct``, ``patience_s``: see ``LargeFile``."""
        super().__init__(model)
        self._outer, self._blobs = blobs.outer, blobs.layers
        self._unchecked = set(range(len(blobs.layers)))
        with _weights_errors():
            self._file = LargeFile(path, direct=direct, patience_s=patience_s)
        self.close = self._file.close
        self.name = f"{path} ({'around' if direct else 'through'} the page cache)"

    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        buffer = page_aligned(self._outer.num_bytes, _CPU)
        with _weights_errors():
            self._file.read(self._outer, _OUTER, buffer.numpy().data, moved, check=True)
        return buffer.to(device)

    def read_plain(self, layer: int, device: torch.device, moved: Moved) -> Tensor:
        plain, stored = self.model.plain[layer], self.model.stored[layer]
        source = self.read(layer, page_aligned(stored.num_bytes, _CPU), moved).to(device)
        if stored.is_plain:
            return source
        decoded = page_aligned(plain.num_bytes, device)
        stored.decode(source, plain, decoded)
        return decoded

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        blob, check = self._blobs[layer], layer in self._unchecked
        with _weights_errors():
            self._file.read(blob, f"layer {layer}", into.numpy().data, moved, check=check)
        self._unchecked.discard(layer)
        return into


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared folder whose manifest matches the configuration and the files' sizes."""

    folder: Path
    manifest: Manifest
    config: LlamaConfig
    layout: Layout
    stored: WeightFormats
    int8_activations: bool = False  # multiply packed matrices with activations in 8 bits

    @property
    def tp(self) -> int:
        return self.manifest.tp

    @property
    def formats(self) -> WeightFormats:
        return self.stored.with_int8_activations() if self.int8_activations else self.stored

    @property
    def paths(self) -> tuple[Path, ...]:
        """All ranks' files, by rank."""
        return tuple(self.manifest.rank_path(self.folder, rank) for rank in range(self.tp))

    def packed(self, rank: int) -> PackedModel:
        dtype, codec = getattr(torch, self.manifest.dtype), parse_codec(self.manifest.codec)
        return pack_model(self.config, self.layout.shards[rank], self.formats, dtype, codec)

    def store(self, rank: int, io: str = "buffered", *, patience_s: float = 1.0) -> DiskStore:
        """Open this rank's file with reads that are ``direct`` or ``buffered``; see ``DiskStore``."""
        model, blobs, direct = self.packed(rank), self.manifest.ranks[rank], io == "direct"
        return DiskStore(self.paths[rank], model, blobs, direct=direct, patience_s=patience_s)


def open_prepared(folder: Path, config: LlamaConfig) -> Prepared:
    """Check the manifest against ``config``, and the files' sizes; raises ModelError. Reads no weights."""
    manifest = read_manifest(folder)
    try:
        formats = WeightFormats({name: PACKED_FORMATS[kind] for name, kind in manifest.packed.items()}, manifest.plain)
        layout = split_model(config, formats, manifest.tp, manifest.shares)
        prepared = Prepared(folder, manifest, config, layout, formats)
        for rank, written in enumerate(manifest.ranks):
            wanted = [blob.num_bytes for blob in prepared.packed(rank).blobs]
            if written.shard != cuts_of(layout.shards[rank]) or [b.num_bytes for b in written.blobs] != wanted:
                raise ValueError(f"rank {rank}'s shard differs")
        for name in ("config.json", "tokenizer.json"):  # sampling and the chat template may be edited
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != manifest.files[name]:
                raise ValueError(f"{name} is not the one that was written")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder}: {MANIFEST} does not match config.json and this version of Tightwire: {error}; make the folder again "
            "with `tightwire prepare`"
        ) from None
    for path, written in zip(prepared.paths, manifest.ranks, strict=True):
        try:
            found = path.stat().st_size
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}; {MAKE_AGAIN}") from None
        if found != written.num_bytes:
            raise ModelError(f"{path}: is {found} bytes long, and {written.num_bytes} were written; {MAKE_AGAIN}")
    return prepared


def find_damage(folder: Path, manifest: Manifest, moved: Moved = lambda num_bytes: None) -> Iterator[str]:
    """Read all files and yield a line per part with a wrong checksum; ``moved`` gets the bytes as they are read."""
    for name, sha256 in sorted(manifest.files.items()):
        path = folder / name
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
                yield f"{path}: its checksum differs from the one that was written"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}"
    scratch = page_aligned(PIECE_BYTES, _CPU).numpy().data
    for rank, written in enumerate(manifest.ranks):
        path = manifest.rank_path(folder, rank)
        try:
            with _weights_errors():
                file = LargeFile(path, direct=reads_direct(path), patience_s=0.0)
        except WeightsError as error:
            yield str(error)
            continue
        with closing(file):
            file.drop_from_cache()
            for index, blob in enumerate(written.blobs):
                what = f"layer {index - 1}" if index else _OUTER
                try:
                    with _weights_errors():
                        file.read(blob, what, scratch, moved, check=True)
                except WeightsError as error:
                    yield str(error)
