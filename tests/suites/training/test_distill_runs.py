"""Runs of a distillation: a target answers with the server's engine in the same process, and a small model learns from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.server.draft_engine import drafting_engine
from helpers.server.local_engine import continue_prompts, local_engine
from helpers.training.training_runs import StopAfter, log_lines, losses, make_config, train
from tiny import make_tiny

from tightwire.model.open import open_checkpoint
from tightwire.post_training import make_engines
from tightwire.recorded_answers import read_recorded
from tightwire.training.checkpoint.folders import OtherRunError
from tightwire.training.config.read import ConfigError
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError

_PROMPTS, _VOCAB = 40, 304
_SHAPE = "hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48"


def _config(folder: Path, *overrides: str, run: str = "run", model: str = "") -> TrainConfig:
    """40 prompts; the target has two layers. ``model``: of the draft."""
    target, path = folder / "target", folder / "prompts.jsonl"
    if not target.exists():
        make_tiny(target)
        lines = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(_PROMPTS)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return make_config(
        folder,
        f"model={{{model or f'shape: {{{_SHAPE}}}, tokenizer: {target}'}}}",
        f"data={{files: [{path}], kind: distill, sequence_tokens: 64, shuffle_documents: 8, held_out: 0.2}}",
        f"distill={{target: {target}, answer_tokens: 12, top: 16}}",
        "batch={sequences: 4, micro_sequences: 1}",
        *overrides,
        run=run,
    )


def _train(config: TrainConfig, world_size: int = 1, **options: Any) -> list[int]:
    return train(config, world_size, engines=make_engines(), **options)


def _answers(config: TrainConfig) -> list[dict[str, Any]]:
    files = sorted(config.answers_folder.glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_draft_of_all_layers_is_the_target_to_begin_with(tmp_path: Path) -> None:
    """What the engine recorded is what the trainer computes at the same places, whatever the answers' temperature is."""
    layers = f"start: {tmp_path / 'target'}, layers: [0, 1]"
    given = f"distill.top={_VOCAB}", "distill.temperature=0.7", "schedule={steps: 1}", "evaluation.every=1"
    config = _config(tmp_path, *given, model=layers)
    _train(config)

    step, evaluated = log_lines(config)
    assert 0 <= step["loss"] < 1e-5 and step["greedy"] == 1
    assert evaluated["tokens"] > 0 and 0 < step["sampled"] < 1
    answers, recorded = _answers(config), read_recorded(config.answers_folder)
    assert len(answers) == _PROMPTS and sum(each["num_answered"] for each in answers) == len(recorded.ids_PK)
    assert np.exp(recorded.logs_PK).sum(1) == pytest.approx(1, abs=1e-4)
    assert all(1 <= each["num_answered"] <= 12 for each in answers)


def test_a_draft_learns_and_its_export_drafts_for_the_target(tmp_path: Path) -> None:
    config = _config(
        tmp_path, "schedule.steps=60", "evaluation.every=60", "distill.temperature=0.2", "export.dtype=float32"
    )
    _train(config)

    lines = log_lines(config)
    assert lines[-2]["loss"] < 0.7 * lines[0]["loss"]
    draft, target = open_checkpoint(f"{config.run}/model"), open_checkpoint(str(tmp_path / "target"))
    assert draft.tokenizer().backend.get_vocab() == target.tokenizer().backend.get_vocab()
    asked = [each["tokens"][: -each["num_answered"]] for each in _answers(config)[:20]]
    with local_engine(target, max_model_len=64) as local:
        answers = continue_prompts(local.engine, asked, max_tokens=12)
    with local_engine(draft, max_model_len=64) as local:
        drafts = [continue_prompts(local.engine, [prompt], max_tokens=1)[0] for prompt in asked]
    right = sum(draft == answer[:1] for draft, answer in zip(drafts, answers, strict=True))
    assert right >= 5, "of 20 first tokens; by chance none of 304"
    models = {"itself": target, "draft": draft}
    with drafting_engine(models, "draft", text=False, max_model_len=64) as (local, _, _):  # 17 would have none
        assert continue_prompts(local.engine, asked[:16], max_tokens=12) == answers[:16]
        assert local.engine.stats().counters.num_accepted_draft_tokens > 0


def test_a_stopped_run_resumes_to_the_bit_and_ranks_learn_the_same(tmp_path: Path) -> None:
    alone, parted = _config(tmp_path, run="alone"), _config(tmp_path, run="parted")
    shared = _config(tmp_path, "parallel.sharding=zero3", run="shared")
    _train(alone)
    assert _train(parted, stop_signal=lambda: 2) == [2], "behind the recording, which stays"
    assert not losses(parted) and len(_answers(parted)) == _PROMPTS
    _train(parted, stop_signal=StopAfter(parted, 3))
    _train(parted)
    _train(shared, 2)

    assert losses(parted) == losses(alone)
    assert [each["tokens"] for each in _answers(shared)] == [each["tokens"] for each in _answers(alone)]
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-4)


def test_the_target_asks_itself_and_another_run_learns_from_the_same_answers(tmp_path: Path) -> None:
    first = _config(tmp_path, "distill.questions=250", f"distill.answers={tmp_path / 'answers'}", "schedule={steps: 2}")
    _train(first)
    answers = _answers(first)
    own = answers[_PROMPTS:]
    assert 0 < len(own) <= 250 and all(each["prompt"][0]["content"].strip() for each in own)
    assert [each["place"] for each in answers] == np.cumsum(
        [0, *(each["num_answered"] for each in answers[:-1])]
    ).tolist()

    again = _config(
        tmp_path, "distill.questions=250", f"distill.answers={tmp_path / 'answers'}", "optimizer.lr=1e-3", run="again"
    )
    _train(again)
    assert _answers(again) == answers and losses(again)[0] == losses(first)[0]
    with pytest.raises(
        ValueError, match=r"answers has answers that were recorded with questions=250, not 20; .*distill.answers"
    ):
        _train(_config(tmp_path, "distill.questions=20", f"distill.answers={tmp_path / 'answers'}", run="third"))
    with pytest.raises(OtherRunError, match="distill is"):
        _train(_config(tmp_path, "distill.questions=250", "distill.top=8", "schedule.steps=3"))


def test_damaged_answers_are_named_and_can_be_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path, "schedule={steps: 1}")
    _train(config)
    rows, lines = (config.answers_folder / f"00000.{end}" for end in ("npz", "jsonl"))
    before = {path: path.read_bytes() for path in (rows, lines)}
    unknown = before[lines].replace(b'"tokens": [', b'"tokens": [70000, ', 1)
    for path, content in ((lines, before[lines][:-99]), (lines, b'{"place": 7}'), (lines, unknown), (rows, b"")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"00000.jsonl: it or its .npz is damaged \(.*\); remove it, and the same"):
            _train(config)
        path.write_bytes(before[path])
    rows.write_bytes(b"PK")
    lines.unlink()
    _train(config)
    assert {path: path.read_bytes() for path in (rows, lines)} == before

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(
        ValueError, match=r"00000.jsonl: it or its .npz cannot be read \(.*denied\); let this user read it$"
    ):
        _train(config)

    (config.answers_folder / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match="has answers that were recorded with target=None, not"):
        _train(config)


def test_a_target_with_padding_never_answers_with_it(tmp_path: Path) -> None:
    """Models of a family have the same tokens and unlike padding behind them."""
    padded = make_tiny(tmp_path / "target", vocab_size=2 * _VOCAB)
    tokenizer = make_tiny(tmp_path / "plain") / "tokenizer.json"
    (padded / "tokenizer.json").write_text(tokenizer.read_text())
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "say"}]}\n' * _PROMPTS)
    config = _config(tmp_path, "schedule={steps: 1}", "distill.top=400")
    _train(config)

    assert max(max(each["tokens"]) for each in _answers(config)) < _VOCAB
    recorded = read_recorded(config.answers_folder)
    assert recorded.ids_PK.max() < _VOCAB and np.exp(recorded.logs_PK).sum(1) == pytest.approx(1, abs=1e-4)


def test_another_vocabulary_and_missing_room_are_refused(tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", vocab_size=320)
    with pytest.raises(
        ValueError, match=r"the vocabulary of target is not that of the model to train, from token 304 on"
    ):
        _train(_config(tmp_path, model=f"start: {other}"))
    with pytest.raises(ValueError, match=r"from token 304 on .*give model.tokenizer="):
        _train(_config(tmp_path, model=f"shape: {{{_SHAPE}, vocab_size: 320}}"))
    with pytest.raises(ValueError, match=r"distill.target: target has no chat template|has no chat template"):
        plain = make_tiny(tmp_path / "plain", chat=False)
        _train(_config(tmp_path, f"distill.target={plain}", model=f"start: {plain}"))
    with pytest.raises(ValueError, match=r"distill.target: .*nowhere"):
        _train(_config(tmp_path, f"distill.target={tmp_path / 'nowhere'}"))
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        _config(tmp_path, "distill.answer_tokens=64")
    with pytest.raises(ConfigError, match="need each other"):
        _config(tmp_path, "data.kind=chat")
    with pytest.raises(ConfigError, match=r"remove model.lora and data.held_out_files"):
        _config(tmp_path, model=f"start: {tmp_path / 'target'}, lora: {{}}")
    with pytest.raises(ConfigError, match="layers are those of an existing model"):
        _config(tmp_path, "model.layers=[0]")
    with pytest.raises(ValueError, match="the model has layers 0 to 1, got 2"):
        _train(_config(tmp_path, model=f"start: {tmp_path / 'target'}, layers: [0, 2]"))
    with pytest.raises(
        DataError, match=r"prompts.jsonl:1: a prompt of \d+ tokens and an answer of .*=60 are more than"
    ):
        _train(_config(tmp_path, "distill.answer_tokens=60", run="long"))
