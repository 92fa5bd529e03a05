"""Runs that end early: refusals at the start, inf and NaN, damaged files."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.training_runs import log_lines, losses, make_config, train
from tiny import make_tiny

from tightwire.training.checkpoint.folders import CheckpointError, OtherRunError, checkpoints_in
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError
from tightwire.training.engine.engine import Engine
from tightwire.training.run.loop import BrokenDataError, DivergedError
from tightwire.training.start.model import StartingModel
from tightwire.training.start.objective import NextToken
from tightwire.whole_folder import only_user

_RUINOUS = ("optimizer={name: sgd, lr: 1e30, weight_decay: 0, clip_norm: null}", "schedule.warmup_steps=0")


def test_a_nan_gradient_stops_the_run_and_names_flat_parameters_and_folder(tmp_path: Path) -> None:
    with pytest.raises(
        DivergedError,
        match=r"step 2: the gradient is inf or NaN in .*norms.*step-00000001 has the weights of this step: remove "
        r"that folder, and start again",
    ):
        train(make_config(tmp_path, *_RUINOUS, "checkpoint.every=1"), 2)


def test_the_last_good_checkpoint_is_older_than_the_failed_step(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=2", "optimizer={name: sgd, weight_decay: 0}"))
    with pytest.raises(DivergedError, match=r"remove that folder, to resume from .*, .*step-00000002\. The same run"):
        train(make_config(tmp_path, *_RUINOUS, "checkpoint.every=1"))


def test_nan_weights_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ruin(optimizer: torch.optim.SGD, *_: object) -> None:
        optimizer.param_groups[0]["params"][0].data[0] = math.inf

    monkeypatch.setattr(torch.optim.SGD, "step", ruin)
    config = make_config(tmp_path, "optimizer={name: sgd, weight_decay: 0}", "checkpoint.every=1")
    with pytest.raises(DivergedError, match="step 1: weights or optimizer state .* in embedding; .* no checkpoint yet"):
        train(config)
    assert not checkpoints_in(Path(config.run))


def _with_late_damage(tmp_path: Path, lines: int) -> str:
    path = tmp_path / "late.jsonl"
    path.write_text("".join(f'{{"text": "document {i} of many"}}\n' for i in range(lines)) + "{oops}\n")
    return f"data={{files: [{path}], sequence_tokens: 16, held_out: 0, shuffle_documents: 0}}"


def test_a_signal_before_the_first_step_ends_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert train(config, 2, stop_signal=lambda: 15) == [15, 15]
    assert not log_lines(config) and not checkpoints_in(Path(config.run))


def test_a_signal_ends_an_evaluation_and_the_run_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated, total = [], NextToken.total
    monkeypatch.setattr(NextToken, "total", lambda *given: evaluated.append(1) or total(*given))
    config = make_config(tmp_path, "evaluation.every=2", "evaluation.prompts=[a]")
    assert train(config, 2, stop_signal=lambda: 15 if evaluated else 0) == [15, 15]

    assert len(evaluated) == 2, "a batch on each rank"
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-00000002"]
    assert [line["step"] for line in log_lines(config)] == [1, 2]


def test_damaged_data_ends_a_run_and_saves_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _with_late_damage(tmp_path, 30)  # some 40 sequences, of which a step takes 8
    with pytest.raises(
        BrokenDataError,
        match=r"after step (\d): .*late.jsonl:31: is not valid JSON.* trained weights are in .*0000000\1;",
    ):
        train(make_config(tmp_path, data), 2)

    path = tmp_path / "late.jsonl"
    path.write_text(path.read_text().replace("{oops}", "      "))
    config = make_config(tmp_path, data)
    train(config, 2)
    assert len(losses(config)) == 6
    assert "reading the data up to position" in capsys.readouterr().err


def test_any_error_of_the_reader_ends_a_run_and_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def fail(document: str, share: float) -> bool:
        nonlocal count
        count += 1
        return 1 // (40 - count) < 0

    monkeypatch.setattr("tightwire.training.data.documents.is_held_out", fail)
    with pytest.raises(
        BrokenDataError, match=r"after step \d: the data cannot be read: ZeroDivisionError.* weights are in"
    ):
        train(make_config(tmp_path, "data.sequence_tokens=32"))
    assert checkpoints_in(tmp_path / "run")


def test_damaged_data_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="late.jsonl:3: is not valid JSON"):
        train(make_config(tmp_path, _with_late_damage(tmp_path, 2)), 2)


def test_data_without_a_document_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for tokenizer in ("bytes", "bpe:300"):
        with pytest.raises(DataError, match=r"data.files: there is no document in .*empty.txt; give files with text"):
            train(make_config(tmp_path, f"data.files=[{tmp_path}/empty.txt]", f"model.tokenizer={tokenizer}"), 2)


def test_a_checkpoint_of_another_model_or_other_data_is_refused(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=1", "schedule.warmup_steps=0"))

    for override, words in (
        (
            "model.shape.hidden_size=64",
            r"is a checkpoint of another model: head_dim is 8 in the checkpoint and 16 here",
        ),
        (
            "data.sequence_tokens=8",
            "order of the data would differ: sequence_tokens is 16 in the checkpoint and 8 here",
        ),
        ("optimizer.name=adam", "has optimizer AdamW, but this run has Adam"),
        ("checkpoint.resume=false", r"has checkpoints \(step-00000001\) but checkpoint.resume is false"),
    ):
        with pytest.raises(OtherRunError, match=words):
            train(make_config(tmp_path, override))


def test_files_that_are_held_out_may_move_but_not_go(tmp_path: Path) -> None:
    def config(steps: int, *files: str) -> TrainConfig:
        for name in files:
            (tmp_path / name).write_text('{"text": "a document that nobody learns"}\n')
        held_out = ", ".join(str(tmp_path / name) for name in files)
        schedule = f"schedule.steps={steps}", "schedule.warmup_steps=0"
        return make_config(tmp_path, *schedule, "data.held_out=0", f"data.held_out_files=[{held_out}]")

    train(config(1, "here.jsonl"))
    train(config(2, "there.jsonl"))
    with pytest.raises(OtherRunError, match="held_out_files is True in the checkpoint and False here"):
        train(config(3))


def test_a_checkpoint_of_another_model_of_the_same_sizes_is_refused(tmp_path: Path) -> None:
    """Exports of different runs have one name. The same weights may be elsewhere."""
    for folder, seed in (("one", 0), ("other", 1), ("copy", 0)):
        make_tiny(tmp_path / folder / "model", seed=seed)
    steps = "schedule={steps: 1, warmup_steps: 0}"
    train(make_config(tmp_path, f"model={{start: {tmp_path}/one/model}}", steps))

    with pytest.raises(
        OtherRunError, match=r"of another model: model.start=.*other/model has other weights than its run began with"
    ):
        train(make_config(tmp_path, f"model={{start: {tmp_path}/other/model}}"), 2)
    train(make_config(tmp_path, f"model={{start: {tmp_path}/copy/model}}", steps))


def test_a_refused_run_leaves_the_configuration_of_the_run_before(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=1", "schedule.warmup_steps=0"))
    before = (tmp_path / "run" / "config.yaml").read_text()
    assert "steps: 1\n" in before
    with pytest.raises(OtherRunError):
        train(make_config(tmp_path, "optimizer.name=adam"), 2)
    assert (tmp_path / "run" / "config.yaml").read_text() == before


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    left = tmp_path / "run" / "step-00000001.partial"
    left.mkdir(parents=True)
    with (
        only_user(tmp_path / "run"),
        pytest.raises(ValueError, match=rf"run: .*run is used by process {os.getpid()} on .*; wait until it ends, or"),
    ):
        train(config, 2)
    assert left.is_dir()


def test_options_that_need_state_which_the_checkpoint_lacks_are_refused(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=2"))
    words = (
        r"has no max_exp_avg_sq of the optimizer, which optimizer.options need here; restore those of its run, \{\}, or"
    )
    with pytest.raises(OtherRunError, match=words):
        train(make_config(tmp_path, "optimizer.options={amsgrad: true}"), 2)


def test_fewer_steps_than_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=2"))
    with pytest.raises(OtherRunError, match=r"more steps than schedule.steps=1; give at least 2"):
        train(make_config(tmp_path, "schedule.steps=1", "schedule.warmup_steps=0"))


def test_frozen_parameters_cannot_be_trained_on_resume(tmp_path: Path) -> None:
    frozen = "model.frozen=['model.layers.0.*']"
    train(make_config(tmp_path, "schedule.steps=2", frozen))
    with pytest.raises(OtherRunError, match=r"no weights of model.layers.0.*was frozen \(model.frozen=\['model"):
        train(make_config(tmp_path))


def test_trained_parameters_cannot_be_frozen_on_resume(tmp_path: Path) -> None:
    train(make_config(tmp_path, "schedule.steps=2"))
    with pytest.raises(OtherRunError, match=r"has trained weights of model.layers.0.*, which is not trained here"):
        train(make_config(tmp_path, "model.frozen=['model.layers.0.*']"))


def test_other_frozen_weights_than_those_of_the_checkpoint_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = "model.frozen=['model.layers.0.*']"
    train(make_config(tmp_path, "schedule.steps=2", frozen))
    read = StartingModel.read
    monkeypatch.setattr(StartingModel, "read", lambda start, name: read(start, name) + 1)
    with pytest.raises(OtherRunError, match="was trained beside other frozen weights than new has now"):
        train(make_config(tmp_path, frozen), 2)


def test_a_damaged_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    config = make_config(tmp_path, "schedule.steps=2")
    train(config, 2)
    path = checkpoints_in(Path(config.run))[-1] / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-00000002: __1_0.distcp is damaged.*no earlier checkpoint"):
        train(make_config(tmp_path), 2)


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("metrics.jsonl", True, "the log .*metrics.jsonl cannot be written"),
        ("model", False, "export.folder: .*model: exists and is not a folder"),
    ],
)
def test_a_folder_that_blocks_the_export_is_detected_at_the_start(
    tmp_path: Path, name: str, folder: bool, words: str
) -> None:
    config = make_config(tmp_path)
    place = Path(config.run) / name
    place.mkdir(parents=True) if folder else (place.parent.mkdir(), place.touch())
    with pytest.raises(ValueError, match=words):
        train(config, 2)


def test_an_unusable_export_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="export.folder: .* exists and has no config.json"):
        train(make_config(tmp_path, f"export.folder={tmp_path}"))


def test_a_folder_that_no_run_exported_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="export.folder: .* exists and has no tightwire-export.json"):
        train(make_config(tmp_path, f"export.folder={tmp_path}/project"))


def test_too_little_held_out_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"held-out documents do not fill one sequence.*raise data.held_out \(now 0.0\)"
    ):
        train(make_config(tmp_path, "evaluation.every=2", "data.held_out=0"))


def test_sequences_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sequence_tokens=16 is more than the model's 8 positions"):
        train(make_config(tmp_path, "model.shape.max_position_embeddings=8"))


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "touch", lambda path: None)  # as on another machine's disk
    monkeypatch.setattr(Path, "unlink", lambda path: None)
    with pytest.raises(ValueError, match="ranks 0 and 1 cannot see files that rank 0 writes"):
        train(make_config(tmp_path), 2)


_SGD = ("optimizer.name=sgd", "optimizer.weight_decay=0")


@pytest.mark.parametrize(
    "overrides",
    [(), (*_SGD, "parallel.between.kind=dgc"), (*_SGD, "parallel.between.kind=top-k")],
    ids=["adamw", "dgc", "top-k"],
)
def test_too_little_disk_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    shape = "model.shape={hidden_size: 128, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 512}"
    config = make_config(tmp_path, *overrides, shape, "schedule={steps: 1}", "export.dtype=float32")
    train(config, 2)
    run = Path(config.run)
    checkpoint, model = (
        sum(path.stat().st_size for path in folder.iterdir()) for folder in (checkpoints_in(run)[0], run / "model")
    )

    def room(free: float) -> None:
        shutil.rmtree(run, ignore_errors=True)
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": int(free)}))
        train(config, 2)

    needed = 3 * checkpoint + model  # two stay, and one more while it is written
    room(needed)
    with pytest.raises(ValueError, match=r"no room for 3 checkpoints of .* and the exported model of .* are needed"):
        room(0.9 * needed)  # what is not counted are names, offsets and the tokenizer


def test_ranks_with_different_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("another text")
    overrides = ("optimizer.lr=1", "schedule.steps=9", f"data.files=[{tmp_path}/other.txt]", "log.every=3")
    with pytest.raises(ValueError, match="ranks have different configurations") as error:
        train(make_config(tmp_path), 2, others={1: make_config(tmp_path, *overrides)})

    text = str(error.value)
    assert "optimizer.lr is 0.01 on rank 0, 1.0 on rank 1; schedule.steps is 6 on rank 0, 9 on rank 1" in text
    assert "the fingerprint of data.files is" in text and "log.every" not in text
    assert not (tmp_path / "run").exists()


def test_replicas_with_different_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Engine.load_full

    def load_badly(engine: Engine, *args: Any) -> None:
        load(engine, *args)
        _, first = next(engine.named_flat_params())
        first.data[:1].view(torch.int32).add_(engine.groups.main.rank)  # the last bit

    monkeypatch.setattr(Engine, "load_full", load_badly)
    with pytest.raises(ValueError, match="ranks 0 and 1 have different weights in embedding"):
        train(make_config(tmp_path), 2)
