"""Checkpoints are whole or not there: names come last, old ones go, and a full disk leaves what was."""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_in_process

from tightwire.comm.group.group import Group, in_process_groups
from tightwire.training.checkpoint import files as module
from tightwire.training.checkpoint import folders
from tightwire.training.checkpoint.files import Checkpointer, Chunk
from tightwire.training.checkpoint.folders import (
    CheckpointError,
    check_files,
    checkpoints_in,
    folder_of,
    partial_of,
    read_description,
    remove_partial,
)
from tightwire.training.ranks.groups import Control


def _checkpointer(run: Path, keep: int = 2) -> Checkpointer:
    return Checkpointer(run, Control(in_process_groups(1)[0]), keep=keep)


def _piece(value: float) -> Chunk:
    return Chunk("parameters/a", 4, 0, torch.full((4,), value))


def _save(checkpoints: Checkpointer, step: int) -> str:
    checkpoints.begin(step, [_piece(step)], {"step": step})
    return checkpoints.complete(print).error


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = _checkpointer(tmp_path)
    assert [_save(checkpoints, step) for step in (5, 10, 15)] == ["", "", ""]
    assert checkpoints_in(tmp_path) == [folder_of(tmp_path, 10), folder_of(tmp_path, 15)]
    assert read_description(folder_of(tmp_path, 15))["step"] == 15


def test_a_folder_is_a_checkpoint_only_when_complete(tmp_path: Path) -> None:
    checkpoints = _checkpointer(tmp_path)
    checkpoints.begin(5, [_piece(1.0)], {})
    assert checkpoints.writing and not checkpoints_in(tmp_path)
    checkpoints.complete(print)
    assert checkpoints_in(tmp_path) and not checkpoints.writing


def test_a_slow_disk_is_awaited_and_its_ranks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it takes longer than a collective may."""
    monkeypatch.setattr(module, "_LOOK_S", 0.05)
    monkeypatch.setattr(module, "_SAY_S", 0.1)
    free, write_file, told = threading.Event(), module._write_file, list[str]()

    def write_slowly(folder: Path, chunks: Sequence[Chunk], plans: list[Any], rank: int) -> Any:
        assert rank == 0 or free.wait(30)
        return write_file(folder, chunks, plans, rank)

    def say(text: str) -> None:
        told.append(text)
        free.set()

    def save(group: Group) -> str:
        checkpoints = Checkpointer(tmp_path, Control(group), keep=2)
        checkpoints.begin(5, [Chunk("parameters/a", 8, 4 * group.rank, torch.ones(4))], {"step": 5})
        time.sleep(1.0)
        return checkpoints.complete(say).error

    monkeypatch.setattr(module, "_write_file", write_slowly)
    assert run_in_process(2, save, timeout_s=0.5) == ["", ""]
    assert set(told) == {"waiting for rank 1 to write step-00000005"}
    assert checkpoints_in(tmp_path) == [folder_of(tmp_path, 5)]


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = _checkpointer(tmp_path, keep=1)
    _save(checkpoints, 5)

    def fail(folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "half").write_text("a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_chunks", fail)
    assert "rank 0: step-00000010.partial: [Errno 28] No space left" in (error := _save(checkpoints, 10))
    assert "free on that disk" in error
    assert list(tmp_path.iterdir()) == [folder_of(tmp_path, 5)]
    monkeypatch.undo()
    assert _save(checkpoints, 15) == ""
    assert checkpoints_in(tmp_path) == [folder_of(tmp_path, 15)]


def test_a_failed_removal_of_old_checkpoints_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(module, "prune", fail)
    checkpoints = _checkpointer(tmp_path)
    checkpoints.begin(5, [_piece(1.0)], {})
    folder, error, warning = checkpoints.complete(print)
    assert folder.is_dir() and not error
    assert warning == "checkpoints older than the newest 2 could not be removed: not yours"


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [(_flip_a_bit, "is damaged"), (Path.unlink, "cannot be read"), (Path.mkdir, "cannot be read")],
    ids=["changed", "missing", "folder"],
)
def test_a_damaged_file_is_named_with_the_previous_checkpoint(
    tmp_path: Path, name: str, harm: Callable[[Path], object], words: str
) -> None:
    checkpoints = _checkpointer(tmp_path)
    _save(checkpoints, 5)
    _save(checkpoints, 10)
    check_files(folder := folder_of(tmp_path, 10), read_description(folder), rank=0, world_size=1)

    if harm is Path.mkdir:
        (folder / name).unlink()
    harm(folder / name)

    with pytest.raises(CheckpointError, match=f"{name} {words}.*the previous checkpoint .*step-00000005"):
        for rank in range(3):
            check_files(folder, read_description(folder), rank=rank, world_size=3)


def test_a_checkpoint_that_this_user_may_not_read_is_not_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    checkpoints = _checkpointer(tmp_path)
    _save(checkpoints, 5)
    _save(checkpoints, 10)
    folder = folder_of(tmp_path, 10)
    monkeypatch.setattr(folders, "file_crc", refuse)
    with pytest.raises(
        CheckpointError, match=r"cannot be read: .*Permission denied; it may be whole: let this user read"
    ):
        check_files(folder, read_description(folder), rank=0, world_size=1)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(CheckpointError, match=r"not a readable checkpoint .*Permission denied; it may be whole"):
        read_description(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a readable checkpoint of .*; there is no earlier checkpoint"),
        ("[]", "has no format"),
        ('{"format": 1}', "has format 1, but this version reads format 3"),
        ('{"format": 3}', "is damaged; there is no earlier checkpoint"),
        ('{"format": 3, "crc32": 1, "step": 5}', "is damaged"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, text: str, words: str) -> None:
    _save(_checkpointer(tmp_path), 5)
    (folder_of(tmp_path, 5) / "tightwire.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_description(folder_of(tmp_path, 5))


def test_partial_checkpoints_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    partial = partial_of(folder_of(tmp_path, 5))
    partial.mkdir()
    (partial / "half").write_text("a file")
    assert not checkpoints_in(tmp_path)
    remove_partial(tmp_path)
    assert not partial.exists()


def test_another_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder_of(tmp_path, 5).mkdir()
    with pytest.raises(CheckpointError, match="is not a readable checkpoint of `tightwire train`"):
        read_description(folder_of(tmp_path, 5))
