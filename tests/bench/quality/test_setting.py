"""Windows: spread over the text, never overlapping, calibration apart from measurement."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from tightwire.bench.quality.setting import make_windows, read_text
from tightwire.model.open import open_checkpoint
from tightwire.model.text.tokenizer import Tokenizer

TEXT = "".join(chr(ord("a") + i % 26) if i % 7 else " " for i in range(1000))  # a token each, for a byte tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_checkpoint(str(make_tiny(Path(tmp_path_factory.mktemp("model"))))).tokenizer()


def test_windows_lie_over_the_whole_text_and_apart(tokenizer: Tokenizer) -> None:
    windows = make_windows(tokenizer, TEXT, num_tokens=200, window=40, num_calibration=2)

    assert windows.token_ids_NL.shape == (7, 40)
    assert sorted((*windows.measured, *windows.calibration)) == list(range(7))
    assert (len(windows.measured), len(windows.calibration)) == (5, 2)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    length = 40 - windows.num_first
    rows = windows.token_ids_NL[:, windows.num_first :].tolist()
    starts = [next(i for i in range(0, 1000, length) if ids[i : i + length] == row) for row in rows]
    assert starts == sorted(set(starts)) and starts[-1] > 700


def test_scored_rows_are_followed_by_their_next_ids(tokenizer: Tokenizer) -> None:
    windows = make_windows(tokenizer, TEXT, num_tokens=80, window=40)
    # States that hold the token's own place: a row's next id stands one place further.
    places_BL1 = torch.arange(2 * 40).view(2, 40, 1)
    next_places = windows.scored(places_BL1).flatten() + 1
    assert windows.token_ids_NL.flatten()[next_places].tolist() == windows.next_ids((0, 1)).tolist()
    assert len(next_places) == 2 * windows.num_scored
    generated = replace(windows, num_decode=9)
    places = generated.scored(places_BL1).flatten()
    assert places.tolist() == [*range(31, 39), *range(71, 79)]
    assert windows.token_ids_NL.flatten()[places + 1].tolist() == generated.next_ids((0, 1)).tolist()


def test_a_short_text_says_how_short(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the text has 1000 tokens, but 30 windows of 40 need 1200; .* --tokens 1000"):
        make_windows(tokenizer, TEXT, num_tokens=1200, window=40)


def test_the_error_names_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(ValueError, match=r"--text .*latin cannot be read as UTF-8 text: .*0xe9"):
        read_text(tmp_path / "latin")
    with pytest.raises(ValueError, match="missing cannot be read as UTF-8 text: .*No such file"):
        read_text(tmp_path / "missing")
