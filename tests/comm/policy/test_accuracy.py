from pathlib import Path

import pytest

from tightwire.comm.policy.accuracy import Accuracy, AccuracyFile, Loss, accuracy_path, read_accuracy, write_accuracy

OTHERS = Accuracy(command="tightwire tune --quality m --tp 2")
FILE = AccuracyFile(
    model="m",
    world_size=2,
    dtype="bfloat16",
    tokens=4096,
    losses={"flash-int4": Loss(0.0123, 0.0211)},
    date="2026-11-24T02:00:00+00:00",
)


def test_written_figures_replace_the_default_ones_for_this_model_and_number_of_ranks(tmp_path: Path) -> None:
    assert read_accuracy(tmp_path, "abc", 2, OTHERS) == (OTHERS, None)
    assert write_accuracy(tmp_path, "abc", FILE) == accuracy_path(tmp_path, "abc", 2)
    own, warning = read_accuracy(tmp_path, "abc", 2, OTHERS)
    assert warning is None and own.of_this_model and own.losses == FILE.losses
    source = "measured on this model with 2 ranks, 4,096 tokens, 2026-11-24"
    assert own.describe("flash-int4") == f"KL 0.012, perplexity +2.1 % ({source})"
    for fingerprint, world_size in (("abd", 2), ("abc", 4)):
        assert read_accuracy(tmp_path, fingerprint, world_size, OTHERS) == (OTHERS, None)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"schema": "other"}'])
def test_a_damaged_file_is_reported_and_not_used(tmp_path: Path, content: bytes) -> None:
    path = write_accuracy(tmp_path, "abc", FILE)
    path.write_bytes(content)
    figures, warning = read_accuracy(tmp_path, "abc", 2, OTHERS)
    assert figures == OTHERS
    assert warning is not None and f"{path} is damaged" in warning and f"`{OTHERS.command}` replaces it" in warning


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tune").write_text("a file")
    with pytest.raises(OSError, match="cannot be written .*XDG_CACHE_HOME"):
        write_accuracy(tmp_path, "abc", FILE)
