"""``tightwire bench kernels`` on a CPU: its output and files, and that a wrong answer fails it."""

import csv
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tightwire.bench import cli
from tightwire.bench.kernels import arms
from tightwire.bench.kernels.arms import OPERATIONS
from tightwire.kernels import block_quant
from tightwire.kernels.spec.block_format import BlockFormat

ARGS = ["kernels", "--device", "cpu", "--codecs", "int8,int4-had", "--sizes", "4KiB"]
ARGS += ["--repeats", "3"]


def test_prints_and_keeps_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGS, "--output", str(tmp_path), "--label", "mine"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "codecs of 4KiB" in out
    assert result["schema"] == "tightwire.bench.kernels/2" and result["error"] is None
    assert [(row["codec"], row["operation"]) for row in result["cells"]] == [
        (codec, operation) for codec in ("int8", "int4-had") for operation in OPERATIONS
    ]
    first = result["cells"][0]
    moved = 4096 + 16 * 132  # 2048 numbers are 16 groups of 128 codes, a scale and a zero
    assert first["bytes_per_s"] == pytest.approx(moved / first["seconds"])
    assert first["share_of_copy"] == pytest.approx(first["bytes_per_s"] / first["copy_bytes_per_s"])
    kept = json.loads((tmp_path / Path(result["files"][0]).name).read_text())
    assert len(kept["cells"][0]["samples"]["seconds"]) == 3 and "samples" not in first
    with (tmp_path / Path(result["files"][1]).name).open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in result["cells"]]


def test_a_wrong_answer_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    encode = block_quant.encode

    def encode_wrongly(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None) -> Tensor:
        return torch.bitwise_xor(encode(x_N, fmt, out), 1, out=out)

    monkeypatch.setattr(block_quant, "encode", encode_wrongly)
    assert cli.main(ARGS) == 1
    captured = capsys.readouterr()
    assert "wrong answer: encode int8 4KiB" in captured.err and "WRONG" in captured.out
    assert "encode int8 4KiB" in json.loads(captured.out.splitlines()[-1])["error"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--codecs", "none"], "--codecs: none does not quantize"),
        (["--codecs", "int7"], "--codecs: unknown codec 'int7'"),
        (["--sizes", "6"], "multiples of 4 bytes up to 1GiB, got 6"),
        (["--sizes", "1TiB"], "multiples of 4 bytes up to 1GiB, got 1099511627776"),
    ],
)
def test_bad_options_are_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["kernels", "--device", "cpu", *args])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_has_its_clock_when_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of a second of replays is not timed; here it runs at half its clock for that long."""
    now_s = [0.0]

    def replay() -> None:
        now_s[0] += 0.002 if now_s[0] < 0.05 else 0.001

    def event(**_: object) -> SimpleNamespace:
        own = SimpleNamespace(at_s=0.0, synchronize=lambda: None)
        own.record = lambda: setattr(own, "at_s", now_s[0])
        own.elapsed_time = lambda end: 1e3 * (end.at_s - own.at_s)
        return own

    fake = {"Stream": lambda device: SimpleNamespace(synchronize=lambda: None), "stream": nullcontext, "Event": event}
    fake |= {"CUDAGraph": lambda: SimpleNamespace(replay=replay), "graph": lambda graph, stream: nullcontext()}
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(arms, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    seconds = arms.seconds_per_call(lambda i: None, torch.device("cuda"), repeats=20, limit_s=1.0)
    assert seconds == pytest.approx(20 * [0.001 / 20])
