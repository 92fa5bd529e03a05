"""Copies node 0's model to a node that has none, piece by piece over their connection, into a cache where it stays.

The cache's folder is named by the digest of the files, so a node fetches a model once, and an interrupted copy goes on where it
ended. Each file is compared with its SHA-256 before it gets its name, and again at each start.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf_header import split_parts
from tightwire.sizes import format_bytes
from tightwire.threads import Background
from tightwire.whole_folder import cache_folder

PIECE_BYTES = 1 << 20
_LOCK_S = 1800.0  # for another server on this host that fetches the same model
_PART = ".part"


class FileFacts(msgspec.Struct, frozen=True):
    name: str
    num_bytes: int
    sha256: str


class ModelFiles(msgspec.Struct, frozen=True, tag=True):
    """A message: the files of a model: one, the parts of one, or those of a folder. ``error``: why there are none."""

    files: list[FileFacts]
    is_folder: bool
    error: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.files)).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def share(self, name: str, offset: int) -> float:
        """The share of all bytes before ``offset`` of a file, in the order in which they are copied."""
        before = itertools.takewhile(lambda file: file.name != name, self.files)
        return (sum(file.num_bytes for file in before) + offset) / max(1, self.num_bytes)


Ask = Callable[[str, int], Awaitable[bytes]]  # a file's name and the place of a piece; returns the piece


def list_files(path: Path | None) -> ModelFiles:
    """The files of a model on this host. Cost: reads them all once, for their digests. ``path``: None for random weights."""
    if path is None:
        return ModelFiles([], False, "node 0 has no file of this model")
    try:
        # Neither hidden files, such as this cache's lock, nor unfinished copies.
        own = [file for file in path.glob("[!.]*") if file.is_file() and file.suffix != _PART]
        found = sorted(own) if path.is_dir() else split_parts(path)
        files = [FileFacts(file.name, file.stat().st_size, _sha256(file)) for file in found]
    except OSError as error:
        return ModelFiles([], False, f"node 0 cannot read {path}: {error.strerror}")
    return ModelFiles(files, path.is_dir())


def read_piece(path: Path, files: ModelFiles, name: str, offset: int) -> bytes:
    """A piece of one of ``files`` of the model at ``path``; empty for another file."""
    if name not in {file.name for file in files.files}:
        return b""
    with (path / name if files.is_folder else path.with_name(name)).open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


async def fetch_files(offer: ModelFiles, ask: Ask, show: Callable[[str, float], None]) -> Path:
    """Fetch what the cache lacks; returns the model's file or folder. ModelError: no space, or a file arrived damaged."""
    if offer.error:
        raise ModelError(f"this host has no copy of the model, and {offer.error}")
    if unsafe := [file.name for file in offer.files if Path(file.name).name != file.name or file.name in ("", "..")]:
        raise ModelError(f"node 0 offers files outside the model's folder: {', '.join(unsafe)}")
    folder = cache_folder() / "from-node-0" / offer.digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=_LOCK_S, thread_local=False)
        await Background(lock.acquire).result
        try:
            what = f"copying the model ({format_bytes(offer.num_bytes)}) from node 0"
            for file in offer.files:
                await _fetch(
                    file, folder / file.name, ask, lambda own, file=file: show(what, offer.share(file.name, own))
                )
                show(what, offer.share(file.name, file.num_bytes))
        finally:
            lock.release()
    except Timeout:
        raise ModelError(f"another server has been fetching into {folder} for {_LOCK_S:g} s") from None
    except OSError as error:
        why = f"the model cannot be stored in {folder}: {error.strerror or error}"
        raise ModelError(f"{why}; set XDG_CACHE_HOME to another folder") from error
    return folder if offer.is_folder else folder / offer.files[0].name


async def _fetch(file: FileFacts, path: Path, ask: Ask, show: Callable[[int], None]) -> None:
    if path.is_file():
        if await _is_whole(path, file):
            return
        path.unlink()  # damaged since it was copied
    part = path.with_name(path.name + _PART)
    # What an interrupted copy has left may be damaged: then the whole file is copied again.
    for _ in range(2 if part.exists() else 1):
        with part.open("ab") as out:
            while (offset := out.tell()) < file.num_bytes:
                show(offset)
                piece = await ask(file.name, offset)
                if not piece:
                    raise ModelError(f"{file.name} on node 0 became shorter while it was copied; start all hosts again")
                await asyncio.to_thread(out.write, piece)
        if await _is_whole(part, file):
            part.replace(path)
            return
        part.unlink()
    raise ModelError(f"{file.name} arrived damaged and was removed; start all hosts again")


async def _is_whole(path: Path, file: FileFacts) -> bool:
    return path.stat().st_size == file.num_bytes and await Background(lambda: _sha256(path)).result == file.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
