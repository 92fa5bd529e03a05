"""Pieces on the disk: any cut reads what any other wrote, torch alone does too, and a folder of something else is named."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tightwire.training.checkpoint.files import (
    Chunk,
    finish,
    keys_in,
    plan_of,
    read_chunks,
    write_chunks,
)
from tightwire.training.checkpoint.folders import CheckpointError

_TOTALS = {"parameters/a": 100, "parameters/b": 7}


def _cut(full: dict[str, torch.Tensor], bounds: list[int]) -> list[list[Chunk]]:
    """By rank; ``bounds`` are shares of each tensor in percent."""
    ranks = []
    for low, high in zip([0, *bounds], [*bounds, 100], strict=True):
        chunks = []
        for key, whole in full.items():
            begin, end = len(whole) * low // 100, len(whole) * high // 100
            if begin < end:
                chunks.append(Chunk(key, len(whole), begin, whole[begin:end]))
        ranks.append(chunks)
    return ranks


def _write(folder: Path, bounds: list[int]) -> dict[str, torch.Tensor]:
    full = {key: torch.rand(total) for key, total in _TOTALS.items()}
    ranks = _cut(full, bounds)
    plans = [plan_of(chunks) for chunks in ranks]
    finish(folder, plans, [write_chunks(folder, chunks, plans, rank) for rank, chunks in enumerate(ranks)])
    return full


@pytest.mark.parametrize("written", [[], [50], [10, 30, 80]])
@pytest.mark.parametrize("read", [[], [33], [25, 50, 75]])
def test_another_sharding_reads_the_same_numbers(tmp_path: Path, written: list[int], read: list[int]) -> None:
    full = _write(tmp_path / "c", written)
    got = {key: torch.zeros(total) for key, total in _TOTALS.items()}
    for chunks in _cut(got, read):
        read_chunks(tmp_path / "c", chunks)
    assert all(torch.equal(got[key], full[key]) for key in full)
    assert keys_in(tmp_path / "c") == _TOTALS


def test_writing_from_host_memory_waits_for_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own way would wait for what training has queued on the first GPU, from every rank."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: pytest.fail("asked for a stream"))
    _write(tmp_path / "c", [50])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    full = _write(tmp_path / "c", [50])
    got = {key: torch.zeros(total) for key, total in _TOTALS.items()}
    load(got, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(got[key], full[key]) for key in full)


def test_a_file_holds_only_the_chunks_and_not_their_base_tensors(tmp_path: Path) -> None:
    chunk = Chunk("a", 10, 0, torch.zeros(1 << 20)[:10])
    plans = [plan_of([chunk])]
    write_chunks(tmp_path / "c", [chunk], plans, 0)
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 1 << 16


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Chunk("parameters/c", 7, 0, torch.zeros(7)), "has no parameters/c"),
        (Chunk("parameters/b", 9, 0, torch.zeros(9)), "parameters/b has 7 elements, but this model has 9"),
    ],
)
def test_missing_chunks_are_named(tmp_path: Path, wanted: Chunk, words: str) -> None:
    _write(tmp_path / "c", [50])
    with pytest.raises(CheckpointError, match=words):
        read_chunks(tmp_path / "c", [wanted])


def test_a_truncated_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path / "c", [])
    data = next((tmp_path / "c").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_chunks(tmp_path / "c", [Chunk("parameters/a", 100, 0, torch.zeros(100))])
