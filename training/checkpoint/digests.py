"""Computes a CRC-32 of each checkpoint file after writing it and checks it before resuming.

The checksums detect accidental damage, not deliberate changes. Cost: one more read of each file at about 1 GB/s, by the
thread that wrote it (probably from the page cache), and on resume, with the files divided over the ranks.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHUNK_BYTES = 1 << 22


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The CRC-32 of each file of ``folder``.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    return {name: _crc_of(folder / name) for name in sorted(set(names))}


def find_damage(folder: Path, digests: Mapping[str, int], *, rank: int, world_size: int) -> str:
    """Describe the first damaged file of this rank's share; "" if all are intact."""
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
