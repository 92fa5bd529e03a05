"""Runs on chats: targets weigh the same on any number of ranks, and a stopped run resumes."""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.training_runs import StopAfter, log_lines, losses, make_config, train
from tiny import VARIANTS, make_tiny

from tightwire.model.checkpoint.errors import ModelError
from tightwire.training.config.read import ConfigError
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.chats import up_to_answer
from tightwire.training.data.documents import DataError
from tightwire.training.run.rollouts import find_reward
from tightwire.training.start.reward import RewardModel

_REWARD_RUNS = (("alone",), ("parted",), ("shared", "parallel={sharding: zero3, checkpoint_blocks: all}"))


def _config(folder: Path, *overrides: str, run: str = "run") -> TrainConfig:
    path = folder / "chats.jsonl"
    if not path.exists():
        turns = [(f"say {i}", "abcdefgh"[i % 8] * (1 + i * i % 29)) for i in range(60)]
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = f"data={{files: [{path}], kind: chat, sequence_tokens: 80, shuffle_documents: 8, held_out: 0.2}}"
    return make_config(folder, data, *overrides, run=run)


def test_answers_of_any_length_weigh_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each token of a step once: rows have unlike numbers of targets."""
    alone = _config(tmp_path, run="alone")
    shared = _config(tmp_path, "parallel.sharding=zero3", "batch.micro_sequences=1", run="shared")
    train(alone)
    train(shared, 4)

    assert losses(shared) == pytest.approx(losses(alone), abs=1e-5)
    assert losses(alone)[-1] < losses(alone)[0]


def test_a_stopped_run_on_chats_resumes_to_the_bit_in_a_later_epoch(tmp_path: Path) -> None:
    """Epochs in another order have other numbers of rows."""
    steps = ("schedule.steps=9",)
    whole, parted = _config(tmp_path, *steps, run="whole"), _config(tmp_path, *steps, run="parted")
    train(whole)
    train(parted, stop_signal=StopAfter(parted, 7))
    assert len(losses(parted)) == 7
    train(parted)

    assert losses(parted) == losses(whole)


def test_evaluation_prompts_are_the_users_messages(tmp_path: Path) -> None:
    config = _config(tmp_path, "evaluation={every: 6, sequences: 4, prompts: [say 1], sample_tokens: 4}")
    train(config)

    (line,) = [line for line in log_lines(config) if "held_out_loss" in line]
    assert line["tokens"] > 0 and line["samples"][0][0] == "say 1"


def test_a_chat_that_is_too_long_ends_the_run_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"chats.jsonl:\d+: the chat has \d+ tokens and data.sequence_tokens is 20"):
        train(_config(tmp_path, "data.sequence_tokens=20"))


def _pairs(folder: Path, base: Path, *overrides: str, run: str = "run") -> TrainConfig:
    path = folder / "pairs.jsonl"
    turns = [("prompt", "user", "say {}"), ("chosen", "assistant", "yes {}"), ("rejected", "assistant", "no, never {}")]
    pairs = [{key: [{"role": role, "content": text.format(i)}] for key, role, text in turns} for i in range(60)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = f"data={{files: [{path}], kind: preferences, sequence_tokens: 48, held_out: 0.2}}"
    model, evaluation = f"model={{start: {base}, lora: {{rank: 4}}}}", "evaluation={every: 3, sequences: 6}"
    return make_config(folder, model, data, evaluation, *overrides, run=run)


def test_dpo_learns_preferences_on_any_number_of_ranks_and_resumes_to_the_bit(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    alone, parted = _pairs(tmp_path, base, run="alone"), _pairs(tmp_path, base, run="parted")
    shared = _pairs(tmp_path, base, "parallel={sharding: zero3, checkpoint_blocks: all}", run="shared")
    train(alone)
    train(shared, 2)
    train(parted, stop_signal=StopAfter(parted, 3))
    train(parted)

    assert losses(alone)[0] == pytest.approx(math.log(2), abs=1e-5)  # the adapter begins as the reference
    assert losses(alone)[-1] < 0.6
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-4)
    assert losses(parted) == losses(alone)
    held_out = [line["held_out_loss"] for line in log_lines(alone) if "held_out_loss" in line]
    assert len(held_out) == 2 and held_out[1] < held_out[0] < math.log(2)


def test_a_reward_model_learns_preferences_and_its_folder_scores_answers(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    model = f"model={{start: {base}, lora: {{rank: 4}}, head: reward}}"
    alone, parted, shared = (_pairs(tmp_path, base, model, *more, run=run) for run, *more in _REWARD_RUNS)
    train(alone)
    train(parted, stop_signal=StopAfter(parted, 3))
    train(parted)
    train(shared, 2)

    assert losses(alone)[0] == pytest.approx(math.log(2))  # the head begins with zeros
    assert losses(alone)[-1] < 0.6
    assert losses(parted) == losses(alone)
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-4)
    steps = [line for line in log_lines(alone) if "loss" in line]
    assert steps[-1]["accuracy"] == 1.0 and steps[0]["margin"] == 0.0 < steps[-1]["margin"]
    assert [line["held_out_accuracy"] for line in log_lines(alone) if "held_out_loss" in line][-1] == 1.0

    reward = RewardModel.open(tmp_path / "alone" / "adapter", torch.device("cpu"))
    prompt = [{"role": "user", "content": "say 7"}]
    good, bad = reward([prompt, prompt], ["yes 7", "no, never 7"])
    assert good - bad == pytest.approx(steps[-1]["margin"], rel=0.5)
    with pytest.raises(
        DataError, match=r"an answer of 5\d\d\d tokens with its prompt; the reward model has \d+ positions"
    ):
        reward([prompt], ["x" * 5000])
    _damaged_rewards_are_named(tmp_path / "alone" / "adapter")


def _damaged_rewards_are_named(folder: Path) -> None:
    weights, settings = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    before = weights.read_bytes(), json.loads(settings.read_text())
    for content, changes, words in (
        (before[0][:999], {}, "it is damaged: Error while deserializing header"),
        (b"", {}, "it is damaged: Error while deserializing header"),
        (before[0], {"r": 3}, "lora_A.weight: r and the base model require"),
        (before[0], {"base_model_name_or_path": None}, "it is damaged: expected string"),
        (before[0], {"base_model_name_or_path": "/nowhere"}, "no such model: '/nowhere'"),
    ):
        weights.write_bytes(content)
        settings.write_text(json.dumps(before[1] | changes))
        with pytest.raises(ModelError, match=rf"rewards: .*adapter: .*{words}"):
            find_reward(str(folder), torch.device("cpu"))


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed (pip install peft)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_and_peft_open_the_folder_of_a_reward_model(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    base = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    config = _pairs(tmp_path, base, f"model={{start: {base}, lora: {{rank: 4}}, head: reward}}", "export.dtype=float32")
    train(config)

    folder = tmp_path / "run" / "adapter"
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    theirs = peft.PeftModel.from_pretrained(theirs, str(folder)).eval()
    ours = RewardModel.open(folder, torch.device("cpu"))
    chat = [{"role": "user", "content": "say 7"}, {"role": "assistant", "content": "yes 7"}]
    tokens, _ = up_to_answer(*ours.encode(chat, "a chat"))
    with torch.no_grad():
        want = theirs(torch.tensor([tokens[:-1]])).logits.item()
    assert ours([chat[:1]], ["yes 7"]) == pytest.approx([want], abs=1e-5)


def test_a_reward_model_needs_preferences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head=reward learns from data.kind=preferences, got chat"):
        _config(tmp_path, "model={start: tiny, lora: {}, head: reward}")


def test_preferences_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains an adapter, not the whole model; set model.lora"):
        _config(tmp_path, "data.kind=preferences")
