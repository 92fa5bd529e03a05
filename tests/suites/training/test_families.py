"""An adapter of any family is learned from chats, preferences and rewards; trainer and engine compute the same."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.family_models import make_family_folder
from helpers.model.transformers_reference import greedy
from helpers.server.local_engine import continue_prompts, local_engine
from helpers.training.training_runs import log_lines, losses, make_config, train
from transformers import AutoModelForCausalLM

from tightwire.model.families import FAMILIES, family_named
from tightwire.model.open import open_checkpoint
from tightwire.model.text.tokenizer import MIN_VOCAB_SIZE, byte_backend, with_template
from tightwire.post_training import make_engines
from tightwire.training.config.tree import TrainConfig
from tightwire.training.start.model import StartingModel, build_model

NAMES = [family.names.name for family in FAMILIES]
_UNLIKE = (
    "Gemma 3",
    "Granite 4",
    "OLMo 2",
    "Phi-3",
)  # in norms, windows and scales, in numbers, in places of norms, in files
_MIXED = (
    "Gemma 2",
    "Gemma 3",
    "Ministral",
    "OLMo 3",
    "SmolLM3",
)  # layers of two kinds, up to six before both have come
_PROMPTS = [[5], [72, 101, 108, 108, 111]]
_TURNS = {
    "chat": {"messages": ["user say {}", "assistant {}"]},
    "preferences": {"prompt": ["user say {}"], "chosen": ["assistant yes {}"], "rejected": ["assistant no {}"]},
    "prompts": {"prompt": ["user say {}"]},
}


@pytest.fixture(scope="module", params=NAMES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _base(tmp_path_factory.mktemp("base"), request.param)


def _base(folder: Path, family: str) -> Path:
    """A model of the family, in float32, with a tokenizer of bytes."""
    changes = {} if family in _MIXED else {"num_hidden_layers": 3}
    model = make_family_folder(family_named(family), folder / "model", **changes)
    with_template(byte_backend(MIN_VOCAB_SIZE)).save(model)
    return model


def early_letters(completions: list[str], **_: object) -> list[float]:
    return [sum(letter < "p" for letter in text) / max(1, len(text)) for text in completions]


def _trained(folder: Path, base: Path, kind: str, *overrides: str, world_size: int = 1) -> TrainConfig:
    path = folder / f"{kind}.jsonl"
    lines = [
        {
            key: [dict(zip(("role", "content"), turn.format(i).split(" ", 1), strict=True)) for turn in turns]
            for key, turns in _TURNS[kind].items()
        }
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = min(80, open_checkpoint(str(base)).config.max_positions)
    config = make_config(
        folder,
        f"model={{start: {base}, lora: {{rank: 4}}}}",
        f"data={{files: [{path}], kind: {kind}, sequence_tokens: {tokens}, shuffle_documents: 8}}",
        "batch={sequences: 4, micro_sequences: 1}",
        "schedule={steps: 2, warmup_steps: 0, kind: constant}",
        *overrides,
    )
    train(config, world_size, engines=make_engines())
    return config


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_chats_are_learned(tmp_path: Path, base: Path) -> None:
    how = "parallel.sharding=zero3", "export.dtype=float32", "optimizer.lr=2e-2"
    chats = _trained(tmp_path, base, "chat", *how, world_size=2)
    assert losses(chats)[-1] < losses(chats)[0]
    _check_in_peft(base, Path(chats.run) / "adapter")


@pytest.mark.parametrize("family", _UNLIKE)
def test_preferences_are_learned(tmp_path: Path, family: str) -> None:
    pairs = _trained(tmp_path, _base(tmp_path, family), "preferences")
    assert losses(pairs)[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses(pairs)[-1] < losses(pairs)[0]


def _check_in_peft(base: Path, adapter: Path) -> None:
    """PEFT and a server continue prompts with the adapter alike, by the greedy rule."""
    peft = pytest.importorskip("peft")
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs: Any = peft.PeftModel.from_pretrained(model, adapter).eval()
    wanted = [greedy(theirs, prompt, 8) for prompt in _PROMPTS]
    with local_engine(open_checkpoint(str(base)), tp=2, max_model_len=32, adapters=[adapter]) as local:
        assert continue_prompts(local.engine, _PROMPTS, [1] * len(_PROMPTS), max_tokens=8) == wanted


def test_answers_have_the_probabilities_of_the_trainer(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = "grpo={rewards: ['test_families:early_letters'], samples: 2, answer_tokens: 16, beta: 0.1}"
    _check_answers(tmp_path, base, monkeypatch, answers, "rollout.tp=2")


@pytest.mark.parametrize("family", _UNLIKE)
def test_answers_of_an_engine_that_gathers_the_trainers_layers_have_its_probabilities(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = "ppo={rewards: ['test_families:early_letters'], answer_tokens: 16, beta: 0.1}"
    how = "rollout.weights=partition", "schedule.steps=3"  # two of which learn from the same answers
    _check_answers(tmp_path, _base(tmp_path, family), monkeypatch, answers, *how)


def _check_answers(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    how = "data.sequence_tokens=64", *options, "parallel.sharding=zero3"
    config = _trained(tmp_path, base, "prompts", *how, world_size=2)
    lines = log_lines(config)
    assert all(line["mismatch"] < 2e-5 for line in lines)
    assert lines[-1]["kl"] > 1e-5  # the adapter has changed the model


def test_answers_beyond_the_context_of_the_short_rotary_factors_are_refused(tmp_path: Path) -> None:
    base = _base(tmp_path, "Phi-3")
    with pytest.raises(ValueError, match="data.sequence_tokens=80: beyond 64 tokens .* give at most 64"):
        _trained(tmp_path, base, "prompts", "grpo.rewards=['tightwire.training.data.rewards:json_facts']")


def test_samples_of_a_row_do_not_attend_to_each_other(base: Path) -> None:
    checkpoint = open_checkpoint(str(base))
    reader, tokenizer = checkpoint.reader(), checkpoint.tokenizer()
    start = StartingModel(name=checkpoint.name, config=checkpoint.config, reader=reader, tokenizer=tokenizer)
    model = build_model(start.config, device=torch.device("cpu"))
    for name, _ in list(model.named_parameters()):
        module, _, field = name.rpartition(".")
        setattr(model.get_submodule(module), field, torch.nn.Parameter(start.read(name)))
    model.tie_weights()

    samples = [torch.arange(3, 48), torch.arange(60, 99)]
    positions = [torch.arange(len(sample)) for sample in samples]
    with torch.inference_mode():
        packed = model(torch.cat(samples)[None], position_ids=torch.cat(positions)[None], use_cache=False).logits
        alone = [model(sample[None], use_cache=False).logits for sample in samples]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
