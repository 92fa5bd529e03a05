"""A server whose layers stream: it answers as one that has them all, says what it does, and ends with a reason."""

import re
import signal
from pathlib import Path

import pytest
from helpers.server.local_engine import greedy_text
from helpers.server.server_process import ServerProcess, complete, get
from tiny import make_tiny

from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare

_SMALL = ("--port", "0", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dtype", "float32")
_STREAM = (*_SMALL, "--weights", "stream")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=6)


@pytest.fixture(scope="module")
def answer(model: Path) -> str:
    return greedy_text(model, "hello", 20)


def test_answers_as_with_resident_weights_and_says_what_streams(model: Path, answer: str, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "run", str(model), *_STREAM, "--tp", "2", "--stream-layers", "4") as server:
        url = server.wait_ready()
        assert complete(url, 20).json()["choices"][0]["text"] == answer
        log, metrics = server.log, get(f"{url}/metrics").text
        assert server.end() == 0
    assert "2 of 6 layers are resident; 4 stream from disk" in log
    assert "warning: all weights would fit on the device" in log
    came = re.search(r"^tightwire_weight_stream_bytes_total (\S+)", metrics, re.MULTILINE)
    assert came and float(came[1]) > 0


def test_a_prepared_folder_is_served_whole(model: Path, answer: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(open_checkpoint(str(model)), out, PrepareOptions(tp=2, dtype="float32"))
    with ServerProcess(tmp_path / "run", str(out), *_SMALL, "--tp", "2", "--weights", "resident") as server:
        url = server.wait_ready()
        assert complete(url, 20).json()["choices"][0]["text"] == answer
        assert get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        assert server.end(signal.SIGTERM) == 0


def test_a_prepared_folder_is_served_in_parts_until_a_file_is_cut_which_ends_the_server_with_its_name(
    model: Path, answer: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    prepare(open_checkpoint(str(model)), out, PrepareOptions(dtype="float32"))
    with ServerProcess(tmp_path / "run", str(out), *_STREAM, "--comm-timeout-s", "2") as server:
        url = server.wait_ready()
        assert complete(url, 20).json()["choices"][0]["text"] == answer
        path = out / "rank-0-of-1.weights"
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        response = complete(url, 200)
        assert response.status_code >= 500 or "error" in response.json()
        assert server.wait_exit(60) != 0
        assert "rank-0-of-1.weights" in server.log and "layer" in server.log


def test_a_damaged_prepared_folder_answers_nothing(model: Path, tmp_path: Path) -> None:
    """Files of the right size with other bytes: the first use of the layer ends the server, with the file's name."""
    out = tmp_path / "out"
    prepare(open_checkpoint(str(model)), out, PrepareOptions(dtype="float32"))
    with (out / "rank-0-of-1.weights").open("r+b") as file:
        file.seek(-5000, 2)
        file.write(bytes(range(8)))
    with ServerProcess(tmp_path / "run", str(out), *_SMALL, "--weights", "resident") as server:
        assert server.wait_exit(60) != 0
        assert "rank-0-of-1.weights: layer 5 is damaged" in server.log
        assert "make it again with `tightwire prepare`" in server.log
