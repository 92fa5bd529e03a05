"""Pieces on the disk: any cut reads what any other wrote, torch alone does too, and a folder of something else is named."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tightwire.training.checkpoint.files import CheckpointError, finish, keys_in, plan_of, read_pieces, write_pieces
from tightwire.training.checkpoint.pieces import SavedPiece

_TOTALS = {"parameters/a": 100, "parameters/b": 7}


def _cut(full: dict[str, torch.Tensor], bounds: list[int]) -> list[list[SavedPiece]]:
    """By rank; ``bounds`` are shares of each tensor in percent."""
    ranks = []
    for low, high in zip([0, *bounds], [*bounds, 100], strict=True):
        pieces = []
        for key, whole in full.items():
            begin, end = len(whole) * low // 100, len(whole) * high // 100
            if begin < end:
                pieces.append(SavedPiece(key, len(whole), begin, whole[begin:end]))
        ranks.append(pieces)
    return ranks


def _write(folder: Path, bounds: list[int]) -> dict[str, torch.Tensor]:
    full = {key: torch.rand(total) for key, total in _TOTALS.items()}
    ranks = _cut(full, bounds)
    plans = [plan_of(pieces) for pieces in ranks]
    finish(folder, plans, [write_pieces(folder, pieces, plans, rank) for rank, pieces in enumerate(ranks)])
    return full


@pytest.mark.parametrize("written", [[], [50], [10, 30, 80]])
@pytest.mark.parametrize("read", [[], [33], [25, 50, 75]])
def test_another_cut_reads_the_same_numbers(tmp_path: Path, written: list[int], read: list[int]) -> None:
    full = _write(tmp_path / "c", written)
    got = {key: torch.zeros(total) for key, total in _TOTALS.items()}
    for pieces in _cut(got, read):
        read_pieces(tmp_path / "c", pieces)
    assert all(torch.equal(got[key], full[key]) for key in full)
    assert keys_in(tmp_path / "c") == _TOTALS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_without_this_project(tmp_path: Path) -> None:
    full = _write(tmp_path / "c", [50])
    got = {key: torch.zeros(total) for key, total in _TOTALS.items()}
    load(got, checkpoint_id=tmp_path / "c", no_dist=True)
    assert all(torch.equal(got[key], full[key]) for key in full)


def test_a_file_has_the_pieces_and_not_what_they_are_views_of(tmp_path: Path) -> None:
    piece = SavedPiece("a", 10, 0, torch.zeros(1 << 20)[:10])
    plans = [plan_of([piece])]
    write_pieces(tmp_path / "c", [piece], plans, 0)
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 1 << 16


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (SavedPiece("parameters/c", 7, 0, torch.zeros(7)), "holds no parameters/c"),
        (SavedPiece("parameters/b", 9, 0, torch.zeros(9)), "parameters/b has 7 elements there and 9 here"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, wanted: SavedPiece, words: str) -> None:
    _write(tmp_path / "c", [50])
    with pytest.raises(CheckpointError, match=words):
        read_pieces(tmp_path / "c", [wanted])


def test_a_cut_off_file_is_no_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path / "c", [])
    data = next((tmp_path / "c").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pieces(tmp_path / "c", [SavedPiece("parameters/a", 100, 0, torch.zeros(100))])
