"""The verb: exit codes, signals, and ranks of torchrun of which one is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.training.training_runs import log_lines, losses, make_config, make_prompt_config, train, write_config
from tiny import VARIANTS

from tightwire.__main__ import main
from tightwire.parent_death import state_of
from tightwire.post_training import make_engines
from tightwire.run_page import LOG, SAMPLES
from tightwire.training.checkpoint.folders import checkpoints_in

_PATIENCE_S = 120.0


def _wait_for(event: str, happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{event} never came"
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    def send() -> None:
        log = tmp_path / "run" / LOG
        _wait_for("step 2", lambda: log.is_file() and '"step": 2' in log.read_text())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert main(["train", str(write_config(tmp_path)), "schedule.steps=100000"]) == code
    sender.join()

    steps = log_lines(make_config(tmp_path))[-1]["step"]
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [f"step-{steps:08d}"]
    assert f"stopped after step {steps} of 100000, saved; the same command resumes" in capsys.readouterr().err
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.shape.hidden_size=1000000000", "can't allocate memory: you tried to allocate"),
        ("model.shape.hidden_size=1000000000000", "Storage size calculation overflowed"),
        ("batch={sequences: 1000000000000, micro_sequences: 1000000000000}", "not enough memory"),
    ],
)
def test_missing_memory_is_said_with_what_needs_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert main(["train", str(write_config(tmp_path)), "evaluation.every=2", override]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"tightwire train: {words}") and "`--dry-run` says what takes how much" in told


def test_as_many_blocks_as_there_are_are_recomputed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_config(tmp_path, "parallel.checkpoint_blocks=all", "schedule={steps: 1, warmup_steps: 0}"))
    assert "sharding none, 3 blocks recomputed, in the folder" in capsys.readouterr().err


def test_a_tokenizer_of_a_size_that_none_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size in (100, 1 << 25):
        assert main(["train", str(write_config(tmp_path)), f"model.tokenizer=bpe:{size}"]) == 2
        assert f"bpe:{size} is not possible; give bpe:260 to bpe:16777216" in capsys.readouterr().err


def test_refusals_and_failures_have_different_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path))

    assert main(["train"]) == 2
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert main(["train", path, "optimizer.nmae=sgd"]) == 2
    assert "did you mean 'optimizer.name'?" in capsys.readouterr().err
    assert main(["train", path, "data.files=[none]"]) == 2
    assert "no file matches none" in capsys.readouterr().err
    assert main(["train", path, "optimizer={name: sgd, lr: 1e30, clip_norm: null}", "schedule.warmup_steps=0"]) == 1
    assert "the gradient is inf or NaN" in capsys.readouterr().err


def test_named_examples_are_checked_anywhere_before_torch_is_imported(tmp_path: Path) -> None:
    """In an empty folder, without tensorboard: nothing to refuse, and one line says what is not written."""
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tensorboard" else found(name, *rest)
from tightwire.training import cli
from tightwire.training.config.read import read_config
for example in ("pretrain-10m", "finetune-smollm2"):
    config = cli._prepare(read_config(example))
    assert not config.log.tensorboard
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=_PATIENCE_S
    )

    assert done.returncode == 0, done.stderr
    assert "text: 4 files, 323.9KiB" in done.stderr
    assert "TensorBoard files will not be written: tensorboard is not installed" in done.stderr


def test_exit_codes_of_another_models_checkpoint_and_of_damaged_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late.jsonl").write_text('{"text": "a document of some length"}\n' * 40 + "{oops}\n")
    data = f"data={{files: [{tmp_path}/late.jsonl], sequence_tokens: 16, held_out: 0, shuffle_documents: 0}}"
    path = str(write_config(tmp_path))

    assert main(["train", path, data, "schedule.steps=100"]) == 1
    assert "late.jsonl:41: is not valid JSON" in capsys.readouterr().err
    assert main(["train", path, data, "model.shape.hidden_size=64"]) == 2
    assert "is a checkpoint of another model" in capsys.readouterr().err


def test_a_dry_run_and_the_keys_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path)), "--dry-run", "dry_run.ranks=2"]) == 0
    assert "memory per rank" in capsys.readouterr().out
    assert main(["train", "--keys"]) == 0
    assert "checkpoint.keep" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_killed_in_a_rollout_is_restarted_and_the_same_answers_are_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that gather the layers of their engines from each other, and learn twice from each rollout."""
    (tmp_path / "letters.py").write_text(
        "def early(completions, **_):\n"
        "    return [sum(letter < 'p' for letter in text) / max(1, len(text)) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    overrides = (
        "grpo={rewards: ['letters:early'], samples: 2, answer_tokens: 8, updates: 2}",
        "batch={sequences: 4, micro_sequences: 1}",
        "schedule={steps: 13, warmup_steps: 0}",
        "checkpoint.every=3",
        "parallel.sharding=zero3",
        "rollout.weights=partition",
    )
    shape = {**VARIANTS["odd-heads"], "num_hidden_layers": 3}
    whole = make_prompt_config(tmp_path, *overrides, shape=shape, run="whole")
    train(whole, 2, engines=make_engines())

    config = make_prompt_config(tmp_path, *overrides)
    own = (
        f"model={{start: {config.model.start}, shape: null, lora: {{rank: 4}}}}",
        f"data={config.data.model_dump_json()}",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*torchrun, "--monitor-interval=0.1", "-m", "tightwire", "train", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *own, *overrides], env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_for("a whole checkpoint", lambda: checkpoints_in(tmp_path / "run"))
            os.kill(_children(process.pid)[-1], signal.SIGKILL)
            _, errors = process.communicate(timeout=_PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "resuming from" in errors
    assert losses(config) == losses(whole)
    assert (tmp_path / "run" / SAMPLES).read_text() == (tmp_path / "whole" / SAMPLES).read_text()


@pytest.mark.slow
def test_ranks_save_and_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tightwire",
        "train",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    log, ranks = tmp_path / "run" / LOG, list[int]()
    with subprocess.Popen([*command, str(write_config(tmp_path)), "schedule.steps=100000"], env=environment) as process:
        try:
            _wait_for("step 2", lambda: log.is_file() and '"step": 2' in log.read_text())
            ranks = _children(process.pid)
            process.kill()
            _wait_for("the ranks' end", lambda: not any(state_of(rank) not in ("", "Z") for rank in ranks))
        finally:
            for pid in (process.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    steps = log_lines(make_config(tmp_path))[-1]["step"]
    assert len(ranks) == 2 and [path.name for path in checkpoints_in(tmp_path / "run")] == [f"step-{steps:08d}"]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
