"""``tightwire prepare`` from outside: what it prints, what it refuses, and what is left of it when it is ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny import make_tiny, tiny_config

from tightwire.model.open import open_checkpoint
from tightwire.server.cli.prepare import prepare

# Takes long enough to be ended in the middle, and soon has something written.
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny", dtype="bfloat16")


def test_makes_a_folder_and_says_how_to_serve_it(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [str(model), str(out), "--tp", "2", "--tp-split", "3,1", "--dtype", "float32", "--weight-codec", "int8"]
    assert prepare(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert "tiny in float32, layers encoded as int8-g64: rank 0 " in printed.err and "MB/s" in printed.err
    assert f"serve it with: tightwire serve {out} --tp 2 --tp-split 3,1" in printed.err
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    assert (prepared.tp, prepared.manifest.shares, prepared.manifest.codec) == (2, (3.0, 1.0), "int8-g64")


def test_quantization_and_dtype_are_settled_as_by_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "tiny", head_dim=32)
    assert prepare([str(model), str(tmp_path / "out"), "--quantization", "int4"]) == 0
    assert "Q8_0+Q4_1 and bfloat16" in capsys.readouterr().err
    manifest = json.loads((tmp_path / "out" / "tightwire.json").read_text())["prepared"]
    assert (manifest["dtype"], manifest["packed"]["lm_head.weight"]) == ("bfloat16", "Q8_0")


def test_check_finds_damage(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert prepare([str(model), str(out)]) == 0
    capsys.readouterr()
    assert prepare(["--check", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n" and "every checksum is right" in printed.err
    file = out / "rank-0-of-1.weights"
    content = bytearray(file.read_bytes())
    content[-5000] ^= 1
    file.write_bytes(content)
    assert prepare(["--check", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "damaged parts: 1" in printed.err and "layer 1 is damaged" in printed.err
    (out / "config.json").unlink()
    assert prepare(["--check", str(out)]) == 1
    assert "damaged parts: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MODEL"], "the following arguments are required: OUT"),
        (["MODEL", "OUT", "--weight-codec", "int3"], "--weight-codec: must be one of none, int8, int4, got 'int3'"),
        (["MODEL", "OUT", "--tp", "0"], "--tp must be 1 to 64, got 0"),
        (["MODEL", "OUT", "--tp", "2", "--tp-split", "1"], "--tp-split must be one number for each of the 2 ranks"),
        (["MODEL", "OUT", "--forse"], "unknown argument '--forse'; did you mean '--force'?"),
        (["--check", "OUT", "--tp", "2"], "--check takes only the prepared folder"),
        (["--check", "MODEL", "OUT"], "--check takes only the prepared folder"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        prepare(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model", "{tmp}/out"], "no such model"),
        (["{tmp}/tiny", "{tmp}/out", "--tp", "9"], "cannot split 4 query heads over 9 ranks; use --tp 4 or less"),
        (["{tmp}/tiny", "{tmp}/out", "--dtype", "float16"], "--dtype float16: the checkpoint is in bfloat16"),
        (
            ["{tmp}/tiny", "{tmp}/out", "--quantization", "int8", "--weight-codec", "int8"],
            "tightwire prepare: --weight-codec int8 has nothing to encode: the layers' matrices are already packed (Q8_0)",
        ),
        (["{tmp}/tiny", "{tmp}/tiny"], "exists and is not a prepared folder"),
        (["{tmp}/tiny", "{tmp}/tiny", "--force"], "exists and is not a prepared folder"),
        (["{tmp}/tiny", "{tmp}/none/out"], "create it first"),
        (["--check", "{tmp}/tiny"], "is not a prepared folder"),
        (["--check", "{tmp}/none"], "is not a folder"),
    ],
)
def test_refusals(
    tmp_path: Path, model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(model.iterdir())
    assert prepare([text.format(tmp=tmp_path) for text in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert sorted(model.iterdir()) == before and sorted(tmp_path.iterdir()) == [model]


def test_a_failing_disk_is_exit_code_1(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "pwrite", full)
    assert prepare([str(model), str(tmp_path / "out")]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [model]


@contextmanager
def preparing(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of writing ``folder / "out"``."""
    (folder / "large.json").write_text(json.dumps(tiny_config(**_LARGE)))
    model = f"random:{folder / 'large.json'}"
    command = [sys.executable, "-m", "tightwire", "prepare", model, str(folder / "out"), "--tp", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline_s = time.monotonic() + 120
            while not any(path.stat().st_size for path in folder.glob("out.partial-*/rank-0-of-2.weights")):
                assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with preparing(tmp_path) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    assert process.returncode == code
    assert out == "" and "Traceback" not in err
    assert f"tightwire prepare: interrupted; {tmp_path / 'out'} was not written" in err
    assert [path.name for path in tmp_path.iterdir()] == ["large.json"]


def test_what_a_killed_run_leaves_is_neither_opened_nor_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    model = make_tiny(tmp_path / "tiny")
    with preparing(tmp_path) as process:
        assert prepare([str(model), str(out)]) == 2
        assert f"is being written by another process, in out.partial-{process.pid}" in capsys.readouterr().err
        process.kill()
        process.wait(60)
    left = tmp_path / f"out.partial-{process.pid}"
    assert left.is_dir() and not out.exists()
    assert prepare(["--check", str(left)]) == 2
    assert "was not finished by `tightwire prepare`" in capsys.readouterr().err
    assert prepare([str(model), str(out)]) == 0
    assert f"removed {left}, which an earlier run left unfinished" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.json", "out", "tiny"]
