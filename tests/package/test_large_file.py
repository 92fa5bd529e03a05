"""Blobs from a large file: the same bytes with every way of reading; errors of files and disks name the place."""

import errno
import hashlib
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tightwire import large_file
from tightwire.large_file import (
    PAGE_BYTES,
    PIECE_BYTES,
    Blob,
    DamagedFileError,
    LargeFile,
    LargeFileWriter,
    UnreadableFileError,
    choose_io,
    reads_direct,
)

SIZES = (2 * PAGE_BYTES, PIECE_BYTES + 3 * PAGE_BYTES, PAGE_BYTES)


@pytest.fixture
def content() -> list[bytes]:
    random = Random(0)
    return [random.randbytes(size) for size in SIZES]


@pytest.fixture
def path(tmp_path: Path, content: list[bytes]) -> Path:
    path = tmp_path / "rank-0-of-1.weights"
    path.write_bytes(b"".join(content))
    return path


def blobs_of(content: list[bytes]) -> list[Blob]:
    offsets = [sum(SIZES[:index]) for index in range(len(SIZES))]
    return [
        Blob(offset, len(part), hashlib.sha256(part).hexdigest()) for offset, part in zip(offsets, content, strict=True)
    ]


def page_aligned(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes))


def read(file: LargeFile, content: list[bytes], layer: int) -> tuple[bytes, list[int]]:
    pieces: list[int] = []
    into = page_aligned(SIZES[layer])
    file.read(blobs_of(content)[layer], f"layer {layer}", into, pieces.append, check=True)
    return bytes(into), pieces


@pytest.mark.parametrize("direct", [False, True])
def test_every_pass_reads_the_files_bytes(path: Path, content: list[bytes], direct: bool) -> None:
    if direct and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    file = LargeFile(path, direct=direct, patience_s=0.0)
    for layer in (0, 1, 2, 0, 1, 2):
        got, pieces = read(file, content, layer)
        assert got == content[layer]
        assert sum(pieces) == SIZES[layer] and max(pieces) <= PIECE_BYTES
    file.close()
    file.close()


def test_short_reads_continue(path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(1, len(views[0]) // 3)]], at))
    assert read(LargeFile(path, direct=False, patience_s=0.0), content, 1)[0] == content[1]


def test_direct_reads_begin_at_whole_pages(path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    preadv, offsets = os.preadv, list[int]()

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return min(preadv(fd, views, offset), 5000)  # as a file system may that was interrupted

    file = LargeFile(path, direct=True, patience_s=0.0)
    monkeypatch.setattr(os, "preadv", short)
    assert read(file, content, 0)[0] == content[0]
    assert offsets == [0, PAGE_BYTES]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("missing", [1, PAGE_BYTES])
def test_a_truncated_file_says_where_and_how_much(path: Path, content: list[bytes], missing: int, direct: bool) -> None:
    if direct and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    file = LargeFile(path, direct=direct, patience_s=0.0)
    os.truncate(path, SIZES[0] - missing)
    with pytest.raises(DamagedFileError) as caught:
        read(file, content, 0)
    wanted = f"ends inside layer 0: expected {SIZES[0]} bytes at byte 0, got {SIZES[0] - missing}"
    assert str(path) in str(caught.value) and wanted in str(caught.value)


@pytest.mark.parametrize("at", [0, PIECE_BYTES, SIZES[1] - 1])
def test_a_checksum_finds_a_flipped_bit(path: Path, content: list[bytes], at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[SIZES[0] + at] ^= 1
    path.write_bytes(damaged)
    file, scratch = LargeFile(path, direct=False, patience_s=0.0), page_aligned(PIECE_BYTES)
    with pytest.raises(DamagedFileError, match="layer 1 is damaged"):
        read(file, content, 1)
    message = r"rank-0-of-1\.weights: layer 1 is damaged: its \d+ bytes from byte 8192"
    with pytest.raises(DamagedFileError, match=message):
        file.read(blobs_of(content)[1], "layer 1", scratch, lambda num_bytes: None, check=True)
    file.close()


def test_the_writer_records_what_it_writes(tmp_path: Path, content: list[bytes]) -> None:
    writer, moved = LargeFileWriter(tmp_path / "written"), list[int]()
    for part in content:
        writer.append(memoryview(part), moved.append)
    writer.sync()
    writer.close()
    assert writer.blobs == blobs_of(content) and sum(moved) == sum(SIZES)
    assert (tmp_path / "written").read_bytes() == b"".join(content)


class FailingReads:
    """``preadv`` that fails so many times before it works."""

    def __init__(self, times: int, code: int) -> None:
        self.left, self.code, self.calls = times, code, 0
        self.preadv = os.preadv

    def __call__(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self.preadv(fd, views, offset)


class Clock:
    """Time that passes in sleep alone. ``then``: done after the first."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.pauses: list[float] = []
        self._then = then

    def monotonic(self) -> float:
        return sum(self.pauses)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == 1:
            self._then()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_temporary_error_is_retried_and_logged(
    path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(large_file, "time", clock)
    monkeypatch.setattr(os, "preadv", FailingReads(8, code))
    with caplog.at_level(logging.WARNING):
        assert read(LargeFile(path, direct=False, patience_s=45.0), content, 0)[0] == content[0]
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(caplog.records) == 8
    assert all("layer 0" in text and str(path) in text for text in caplog.messages)


def test_a_file_that_is_copied_again_is_read_when_it_is_there(
    path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = path.read_bytes()
    os.truncate(path, SIZES[0] - 1)
    file = LargeFile(path, direct=False, patience_s=1.0)
    path.unlink()
    clock = Clock(then=lambda: path.write_bytes(whole))
    monkeypatch.setattr(large_file, "time", clock)
    assert read(file, content, 0)[0] == content[0]
    assert clock.pauses == [0.1]


@pytest.mark.parametrize(("code", "calls"), [(errno.EIO, 4), (errno.EBADF, 1)])
def test_a_permanent_error_is_raised(
    path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch, code: int, calls: int
) -> None:
    failing = FailingReads(99, code)
    monkeypatch.setattr(large_file, "time", Clock())
    monkeypatch.setattr(os, "preadv", failing)
    message = rf"layer 2, {SIZES[2]} bytes at byte {sum(SIZES[:2])}: cannot be read: {os.strerror(code)}"
    with pytest.raises(UnreadableFileError, match=message):
        read(LargeFile(path, direct=False, patience_s=1.0), content, 2)
    assert failing.calls == calls


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="none.weights: cannot be opened: No such file"):
        LargeFile(tmp_path / "none.weights", direct=False)


def test_direct_reads_are_chosen_where_the_cache_is_too_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_file, "reads_direct", lambda path: True)
    size = sum(SIZES)
    assert choose_io([path], 2 * size) == "buffered"
    assert choose_io([path], 2 * size - 2) == "direct"
    assert choose_io([path, path], 2 * size) == "direct"


def test_direct_reads_that_are_not_possible(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", FailingReads(99, errno.EINVAL))
    assert choose_io([path], 0) == "buffered"
