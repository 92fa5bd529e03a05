"""The passages of the benches are never served twice; a file that cannot be read is named."""

from pathlib import Path

import pytest

from tightwire.bench.text import Passages, read_text


def test_passages_begin_at_different_places_whatever_their_length():
    passages = Passages(range(100), seed=1)
    taken = [passages.take(length) for length in (10, 50, 10, 1, 30) * 3]
    assert all(ids == list(range(ids[0], ids[0] + len(ids))) for ids in taken)
    assert len({ids[0] for ids in taken}) == len(taken)
    assert [len(ids) for ids in taken[:5]] == [10, 50, 10, 1, 30]


def test_passages_are_the_same_for_the_same_seed():
    assert Passages(range(50), seed=3).take(8) == Passages(range(50), seed=3).take(8)


def test_a_text_without_an_unused_start_is_an_error():
    passages = Passages(range(10))
    passages.take(10)
    with pytest.raises(ValueError, match="10 tokens and no unused start left for a passage of 10"):
        passages.take(10)


def test_the_error_names_an_unreadable_file(tmp_path: Path):
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin cannot be read as UTF-8 text: .*0xe9"):
        read_text(tmp_path / "latin")
    with pytest.raises(ValueError, match="missing cannot be read as UTF-8 text: .*No such file"):
        read_text(tmp_path / "missing")
