"""The manifest of a prepared folder: the model, its split and formats, and the place and checksum of each packed layer.

It is written last, so a folder with a manifest is complete. It has its own checksum, so a changed manifest is rejected.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from tightwire.large_file import Blob
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.layout import Shard

MANIFEST = "tightwire.json"
SCHEMA = "tightwire.prepared/1"

MAKE_AGAIN = "copy the folder again, or make it again with `tightwire prepare`"
_CUTS = ("query_heads", "kv_heads", "mlp_columns", "vocab_rows")


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file: the packed outer tensors, then the packed layers in order, without gaps."""

    shard: dict[str, tuple[int, int]]  # start and stop of each of the shard's ranges
    outer: Blob
    layers: tuple[Blob, ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return self.outer, *self.layers

    @property
    def num_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of tightwire.json: the origin of a prepared folder, the formats of its weights, and its files."""

    model: str  # name of the original model
    dtype: Literal["float32", "bfloat16", "float16"]  # of plain numbers
    shares: tuple[float, ...] | None  # see --tp-split
    codec: str  # of the layers' plain matrices
    packed: dict[str, str]  # WeightFormats: format by matrix
    plain: dict[str, str]  # type in the checkpoint, by matrix
    ranks: tuple[RankFile, ...]
    files: dict[str, str]  # sha256 of the other files, by name

    @property
    def tp(self) -> int:
        return len(self.ranks)

    @property
    def num_bytes(self) -> int:
        """Total size of all ranks' files."""
        return sum(rank.num_bytes for rank in self.ranks)

    def rank_path(self, folder: Path, rank: int) -> Path:
        return folder / file_name(rank, self.tp)


class _Envelope(msgspec.Struct, frozen=True):
    schema: str
    sha256: str  # of the bytes of the next field
    prepared: msgspec.Raw


def file_name(rank: int, tp: int) -> str:
    return f"rank-{rank}-of-{tp}.weights"


def cuts_of(shard: Shard) -> dict[str, tuple[int, int]]:
    """Return a shard in the manifest's form."""
    ranges: dict[str, range] = {name: getattr(shard, name) for name in _CUTS}
    return {name: (own.start, own.stop) for name, own in ranges.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    envelope = _Envelope(SCHEMA, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(envelope) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest; raises ModelError if it cannot be read, is damaged, or has another version."""
    path = folder / MANIFEST
    try:
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: is damaged, or no manifest of a prepared folder: {error}; {MAKE_AGAIN}") from None
    if envelope.schema != SCHEMA:
        raise ModelError(
            f"{path}: has schema {envelope.schema!r}, and this version of Tightwire reads {SCHEMA!r}; make the folder again "
            "with this version's `tightwire prepare`, or serve it with the version that made it"
        )
    body = bytes(envelope.prepared)
    if hashlib.sha256(body).hexdigest() != envelope.sha256:
        raise ModelError(f"{path}: is damaged: its checksum differs; {MAKE_AGAIN}")
    try:
        return msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: lacks fields that this version of Tightwire reads: {error}; {MAKE_AGAIN}") from None
