"""Layers from a file: the same bytes with every way of reading; errors of files and disks name the place."""

import errno
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tightwire.model.buffers import PAGE_BYTES, page_aligned
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel
from tightwire.model.weights.prepared import blob_file
from tightwire.model.weights.prepared.blob_file import (
    PIECE_BYTES,
    Blob,
    BlobFile,
    RankFile,
    choose_io,
    read_blob,
    reads_direct,
)
from tightwire.model.weights.prepared.folder import DiskStore

SIZES = (2 * PAGE_BYTES, PIECE_BYTES + 3 * PAGE_BYTES, PAGE_BYTES)


@pytest.fixture
def content() -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tobytes() for size in SIZES]


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


def open_store(path: Path, content: list[bytes], *, direct: bool = False, patience_s: float = 0.0) -> DiskStore:
    blobs = blobs_of(content)
    stored = [PackedLayer({}, torch.bfloat16, size) for size in SIZES]
    model = PackedModel(PackedLayer({}, torch.bfloat16, 0), tuple(stored), tuple(stored))
    return DiskStore(path, model, RankFile({}, blobs[0], tuple(blobs)), direct=direct, patience_s=patience_s)


def read(store: DiskStore, layer: int) -> tuple[bytes, list[int]]:
    pieces: list[int] = []
    into = page_aligned(SIZES[layer], torch.device("cpu"))
    result = store.read(layer, into, pieces.append)
    assert isinstance(result, Tensor) and result.data_ptr() == into.data_ptr()
    return result.numpy().tobytes(), pieces


@pytest.mark.parametrize("direct", [False, True])
def test_every_pass_reads_the_files_bytes(path: Path, content: list[bytes], direct: bool) -> None:
    if direct and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    store = open_store(path, content, direct=direct)
    for layer in (0, 1, 2, 0, 1, 2):
        got, pieces = read(store, layer)
        assert got == content[layer]
        assert sum(pieces) == SIZES[layer] and max(pieces) <= PIECE_BYTES
    assert ("around" if direct else "through") in store.name and str(path) in store.name
    store.close()
    store.close()


def test_short_reads_continue(path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(1, len(views[0]) // 3)]], at))
    assert read(open_store(path, content), 1)[0] == content[1]


def test_direct_reads_begin_at_whole_pages(path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    preadv, offsets = os.preadv, list[int]()

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return min(preadv(fd, views, offset), 5000)  # as a file system may that was interrupted

    store = open_store(path, content, direct=True)
    monkeypatch.setattr(os, "preadv", short)
    assert read(store, 0)[0] == content[0]
    assert offsets == [0, PAGE_BYTES]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("missing", [1, PAGE_BYTES])
def test_a_truncated_file_says_where_and_how_much(path: Path, content: list[bytes], missing: int, direct: bool) -> None:
    if direct and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    store = open_store(path, content, direct=direct)
    os.truncate(path, SIZES[0] - missing)
    with pytest.raises(WeightsError) as caught:
        read(store, 0)
    wanted = f"ends inside layer 0: expected {SIZES[0]} bytes at byte 0, got {SIZES[0] - missing}"
    assert str(path) in str(caught.value) and wanted in str(caught.value)


@pytest.mark.parametrize("at", [0, PIECE_BYTES, SIZES[1] - 1])
def test_a_checksum_finds_a_flipped_bit(path: Path, content: list[bytes], at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[SIZES[0] + at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(WeightsError, match="layer 1 is damaged"):
        read(open_store(path, content), 1)
    file, blob = BlobFile(path, direct=False, patience_s=0.0), blobs_of(content)[1]
    scratch = page_aligned(PIECE_BYTES, torch.device("cpu"))
    with pytest.raises(WeightsError, match=r"rank-0-of-1\.weights: layer 1 is damaged: its \d+ bytes from byte 8192"):
        read_blob(file, blob, "layer 1", scratch, lambda num_bytes: None, hashlib.sha256())
    file.close()


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
    monkeypatch.setattr(blob_file, "time", clock)
    monkeypatch.setattr(os, "preadv", FailingReads(8, code))
    with caplog.at_level(logging.WARNING):
        assert read(open_store(path, content, patience_s=45.0), 0)[0] == content[0]
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert len(caplog.records) == 8
    assert all("layer 0" in text and str(path) in text for text in caplog.messages)


def test_a_file_that_is_copied_again_is_read_when_it_is_there(
    path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = path.read_bytes()
    os.truncate(path, SIZES[0] - 1)
    store = open_store(path, content, patience_s=1.0)
    path.unlink()
    clock = Clock(then=lambda: path.write_bytes(whole))
    monkeypatch.setattr(blob_file, "time", clock)
    assert read(store, 0)[0] == content[0]
    assert clock.pauses == [0.1]


@pytest.mark.parametrize(("code", "calls"), [(errno.EIO, 4), (errno.EBADF, 1)])
def test_a_permanent_error_is_raised(
    path: Path, content: list[bytes], monkeypatch: pytest.MonkeyPatch, code: int, calls: int
) -> None:
    failing = FailingReads(99, code)
    monkeypatch.setattr(blob_file, "time", Clock())
    monkeypatch.setattr(os, "preadv", failing)
    message = rf"layer 2, {SIZES[2]} bytes at byte {sum(SIZES[:2])}: cannot be read: {os.strerror(code)}"
    with pytest.raises(WeightsError, match=message):
        read(open_store(path, content, patience_s=1.0), 2)
    assert failing.calls == calls


def test_a_missing_file(tmp_path: Path, content: list[bytes]) -> None:
    with pytest.raises(WeightsError, match="none.weights: cannot be opened: No such file"):
        open_store(tmp_path / "none.weights", content)


def test_direct_reads_are_chosen_where_the_cache_is_too_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_file, "reads_direct", lambda path: True)
    size = sum(SIZES)
    assert choose_io([path], 2 * size) == "buffered"
    assert choose_io([path], 2 * size - 2) == "direct"
    assert choose_io([path, path], 2 * size) == "direct"


def test_direct_reads_that_are_not_possible(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", FailingReads(99, errno.EINVAL))
    assert choose_io([path], 0) == "buffered"
