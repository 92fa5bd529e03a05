"""Names, publishes and checks checkpoint folders: ``step-00001200`` is complete, ``step-00001200.partial`` is being written.

A folder is renamed after all its files are on the disk. Each file has a CRC-32, checked before resuming, with the files divided
over the ranks (about 1 GB/s). Does not import torch, so that a run is refused at once.
"""

import json
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tightwire.large_file import file_crc
from tightwire.whole_folder import sync, write_atomic


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is damaged."""


class OtherRunError(ValueError):
    """The checkpoint belongs to a run that this one cannot continue."""


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """The CRC-32 of each file of ``folder``. Raises OSError: a file is missing or cannot be read."""
    return {name: file_crc(folder / name) for name in sorted(set(names))}


_NAME = re.compile(r"step-\d{8,}")
_PARTIAL = ".partial"
_DESCRIPTION = "tightwire.json"
_FORMAT = 3


def folder_of(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _PARTIAL)


def checkpoints_in(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((path for path in run.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def find_checkpoint(run: Path, *, resume: bool) -> Path | None:
    """The newest complete checkpoint of a run, or None. Raises OtherRunError: there is one, and ``resume`` is false."""
    found = checkpoints_in(run)
    if found and not resume:
        raise OtherRunError(
            f"{run} has checkpoints ({found[-1].name}) but checkpoint.resume is false; give another `run`, or remove them"
        )
    return found[-1] if found else None


def newest_before(run: Path, step: int) -> Path | None:
    """The newest complete checkpoint of an earlier step."""
    return next((path for path in reversed(checkpoints_in(run)) if step_of(path) < step), None)


def remove_partial(run: Path) -> None:
    """Remove the unfinished checkpoints of a killed run."""
    for path in run.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def publish(partial: Path, folder: Path, description: Mapping[str, Any]) -> None:
    """Write ``description`` into a folder that is otherwise complete, then rename the folder. Raises OSError."""
    content = json.dumps({"format": _FORMAT, "crc32": _crc_of(description), **description}, indent=1)
    write_atomic(partial / _DESCRIPTION, content.encode())
    sync(partial)
    partial.rename(folder)
    sync(folder.parent)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints. After an OSError, those that remain are complete."""
    for folder in checkpoints_in(run)[:-keep]:
        # Renamed first: an interrupted removal must not leave a folder that looks complete.
        doomed = partial_of(folder)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def read_description(folder: Path) -> dict[str, Any]:
    """The description that ``publish`` wrote. Raises CheckpointError: it is missing, damaged, or of another format."""
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        text = f"{folder}: is not a readable checkpoint of `tightwire train`: {error}{_advice(folder, error)}"
        raise CheckpointError(text) from None
    if not isinstance(description, dict) or "format" not in description:
        raise CheckpointError(f"{folder}: is not a checkpoint of `tightwire train`: {_DESCRIPTION} has no format")
    if (found := description.pop("format")) != _FORMAT:
        raise CheckpointError(
            f"{folder}: has format {found}, but this version reads format {_FORMAT}; resume with the version that wrote it"
        )
    if description.pop("crc32", None) != _crc_of(description):
        raise CheckpointError(f"{folder}: {_DESCRIPTION} is damaged{_advice(folder)}")
    return description


def check_files(folder: Path, description: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """Check this rank's share of the files. Not collective. Raises CheckpointError: one is damaged or cannot be read."""
    digests = description["digests"]
    for name in sorted(digests)[rank::world_size]:
        try:
            if file_crc(folder / name) == digests[name]:
                continue
            damage = f"is damaged: its CRC-32 differs from the recorded one{_advice(folder)}"
        except OSError as error:
            damage = f"cannot be read: {error}{_advice(folder, error)}"
        raise CheckpointError(f"{folder}: {name} {damage}")


def _advice(folder: Path, error: Exception | None = None) -> str:
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | IsADirectoryError):
        return "; it may be whole: let this user read it, and the same command resumes from it"
    if before := newest_before(folder.parent, step_of(folder)):
        return f"; remove this folder, and the same command resumes from the previous checkpoint {before}"
    return "; there is no earlier checkpoint, so start again with another `run`"


def _crc_of(description: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(description).encode())
