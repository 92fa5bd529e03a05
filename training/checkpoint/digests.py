"""A CRC-32 of each file of a checkpoint: taken when it is written, compared before anything is read from it.

It finds what a disk or a copy changed, not what somebody meant to. Cost: each file is read once more, at some 1 GB/s: by
the thread that wrote it, most likely from memory, and before a run goes on, where ranks share the files out.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHUNK_BYTES = 1 << 22


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """
    Raises:
        OSError: a file is not there, or cannot be read.
    """
    return {name: _crc_of(folder / name) for name in sorted(set(names))}


def find_damage(folder: Path, digests: Mapping[str, int], *, rank: int, world_size: int) -> str:
    """Of this rank's share of the files, what is wrong with the first that is not as it was written; "" when all are."""
    for name in sorted(digests)[rank::world_size]:
        try:
            if _crc_of(folder / name) != digests[name]:
                return f"{name} is not as it was written (another CRC-32)"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return ""


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
