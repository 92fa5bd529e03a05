"""A file written in one step: whole, readable by others, and nothing beside it after a failure."""

from pathlib import Path

import pytest

from tightwire.atomic_file import write_atomic


def test_a_file_is_replaced_as_a_whole_and_readable_by_others(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")

    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()

    with pytest.raises(OSError):
        write_atomic(path, b"a file cannot replace a folder")

    assert list(tmp_path.iterdir()) == [path]
