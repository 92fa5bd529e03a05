"""What a run lacks is found before torch is imported."""

import os
from pathlib import Path

import pytest
from helpers.training.training_runs import make_config

from tightwire.comm.group.topology import Topology
from tightwire.training.checkpoint.folders import OtherRunError
from tightwire.training.run.early_checks import check_early


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run=TMP/text.txt/run", "run: .*text.txt is no folder in which you may read and create files"),
        (f"run={300 * 'x'}", "run: x+: cannot be used: .*File name too long"),
        ("model={start: smollm3}", "model.start: no such model: 'smollm3' is neither a file nor a folder"),
        ("model.tokenizer=smollm3", "model.tokenizer: no such model: 'smollm3' is neither a file nor a folder"),
        ("model.tokenizer=bytess", "model.tokenizer: no such model: 'bytess' is neither a file nor a folder"),
        ("data.files=[none.txt]", "no file matches none.txt .*or english-prose"),
        ("data.files=[TMP/empty.txt]", "data.files: there is no document in .*empty.txt"),
    ],
)
def test_a_run_that_cannot_start_is_refused(tmp_path: Path, override: str, words: str) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    config = make_config(tmp_path, override.replace("TMP", str(tmp_path)))
    with pytest.raises(ValueError, match=words):
        check_early(config, Topology(0, 1))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("good", "rewards: good is neither a function, package.module:name, nor a reward model's folder"),
        ("nosuch:good", "rewards: nosuch:good cannot be imported: ModuleNotFoundError"),
        ("json:good", "rewards: json:good cannot be imported: AttributeError"),
    ],
)
def test_rewards_that_do_not_exist_are_refused(tmp_path: Path, reward: str, words: str) -> None:
    model = "model={start: 'random:llama-3.2-1b', shape: null, lora: {}}"
    data = "data={kind: prompts, files: [example-prompts], sequence_tokens: 128}"
    config = make_config(tmp_path, model, data, f"grpo.rewards=['{reward}']")
    with pytest.raises(ValueError, match=words):
        check_early(config, Topology(0, 1))


def test_checkpoints_are_refused_without_resuming(tmp_path: Path) -> None:
    (tmp_path / "run" / "step-00000003").mkdir(parents=True)
    with pytest.raises(OtherRunError, match="has checkpoints .step-00000003. but checkpoint.resume is false"):
        check_early(make_config(tmp_path, "checkpoint.resume=false"), Topology(0, 1))


def test_a_folder_whose_checkpoints_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.R_OK)
    check_early(make_config(tmp_path), Topology(0, 1))
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="run: .*run: cannot be used: .* read and create files"):
        check_early(make_config(tmp_path), Topology(0, 1))
