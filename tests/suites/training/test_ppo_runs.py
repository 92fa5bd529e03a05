"""Runs of PPO: an actor and a critic, adapters of one model whose answers come from the server's engine."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from helpers.training.training_runs import StopAfter, log_lines, losses, make_prompt_config, train
from tiny import VARIANTS

from tightwire.post_training import make_engines
from tightwire.run_page import PAGE, SAMPLES
from tightwire.training.checkpoint.folders import OtherRunError
from tightwire.training.config.read import ConfigError
from tightwire.training.config.tree import TrainConfig
from tightwire.training.run.dry_run import dry_run
from tightwire.training.run.loop import BrokenDataError
from tightwire.training.start.reward import RewardModel


def early_letters(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of letters before p."""
    return [sum(letter < "p" for letter in text) / max(1, len(text)) for text in completions]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def of_sixteen(completions: list[str], **_: Any) -> list[float]:
    return [0.5] * 16 if len(completions) == 16 else []


_HELD_OUT = "data.held_out=0.2"


def _config(folder: Path, *overrides: str, run: str = "run", num_layers: int = 2) -> TrainConfig:
    return make_prompt_config(
        folder,
        "batch={sequences: 8, micro_sequences: 1}",
        "ppo={rewards: ['test_ppo_runs:early_letters'], answer_tokens: 8, beta: 0.1, epochs: 2, minibatches: 2}",
        "schedule={steps: 8, warmup_steps: 0}",
        *overrides,
        run=run,
        shape={**VARIANTS["odd-heads"], "num_hidden_layers": num_layers},
    )


def _train(config: TrainConfig, world_size: int = 1, num_nodes: int = 1, **options: Any) -> None:
    train(config, world_size, num_nodes, engines=make_engines(), **options)


def test_a_critic_that_no_run_exported_is_refused_at_the_start(tmp_path: Path) -> None:
    config = _config(tmp_path)
    (config.run_folder / "critic").mkdir(parents=True)
    (config.run_folder / "critic" / "notes").touch()
    with pytest.raises(ValueError, match=r"run: .*critic exists and has no adapter_config.json"):
        _train(config)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The configuration of a run by one rank that has ended."""
    config = _config(tmp_path_factory.mktemp("alone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        _train(config)
    return config


def _samples(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run) / SAMPLES).read_text().splitlines()]


def test_a_rollout_is_learned_in_minibatches_and_the_first_ratios_are_one(tmp_path: Path) -> None:
    config = _config(tmp_path, "ppo.samples=2", "ppo.clip=1e-6", "ppo.temperature=0.8")
    _train(config)

    lines, samples = log_lines(config), _samples(config)
    assert len(lines) == 8 and len(samples) == 2 * 8 * 2
    assert {sample["step"] for sample in samples} == {1, 5}
    assert all(line["mismatch"] < 1e-5 and 0 <= line["mismatch_kl"] < 1e-6 for line in lines)
    assert [line["clipped"] > 0 for line in lines] == 2 * [False, True, True, True]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-7) and lines[4]["kl"] > 1e-6
    assert lines[0]["value"] == 0 != lines[4]["value"]
    assert lines[0]["reward"] == lines[3]["reward"] != lines[4]["reward"]
    page = (Path(config.run) / PAGE).read_text()
    assert "value loss" in page and "step 5: 16 answers, mean reward" in page


@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_stopped_among_the_steps_of_a_rollout_resumes_to_the_bit(
    tmp_path: Path, alone: TrainConfig, stop: int
) -> None:
    parted = _config(tmp_path, run="parted")
    _train(parted, stop_signal=StopAfter(parted, stop))
    assert len(losses(parted)) == stop
    if stop == 3:
        with pytest.raises(OtherRunError, match="minibatches is 2 in the checkpoint and 1 here; restore"):
            _train(_config(tmp_path, "ppo.minibatches=1", run="parted"))
    _train(parted)

    timed = ("seconds", "tokens_per_s", "mfu", "memory_bytes", "exposed_ms", "answer_s")
    first, second = (
        [{k: v for k, v in line.items() if k not in timed} for line in log_lines(c)] for c in (alone, parted)
    )
    assert first == second
    assert _samples(parted) == _samples(alone)


def test_ranks_that_gather_the_layers_of_their_engines_resume_among_the_steps_of_a_rollout(tmp_path: Path) -> None:
    how = "parallel.sharding=zero3", "rollout.weights=partition", "schedule.steps=6"
    whole, parted = (_config(tmp_path, *how, run=run, num_layers=3) for run in ("whole", "parted"))
    _train(whole, 2)
    _train(parted, 2, stop_signal=StopAfter(parted, 3))
    _train(parted, 2)

    assert losses(parted) == losses(whole)
    assert _samples(parted) == _samples(whole)


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "parallel"),
    [
        (2, 1, "{sharding: zero2}"),
        (2, 1, "{sharding: zero3, checkpoint_blocks: all}"),
        (4, 2, "{sharding: zero3, secondary: true, reduce_path: hierarchical}"),
        (4, 2, "{sharding: hybrid}"),
    ],
)
def test_ranks_learn_the_same_with_every_sharding(
    tmp_path: Path, alone: TrainConfig, world_size: int, num_nodes: int, parallel: str
) -> None:
    """Stopped at the second rollout's first step, of which the answers may differ."""
    shared = _config(tmp_path, f"parallel={parallel}")
    _train(shared, world_size, num_nodes, stop_signal=StopAfter(shared, 5))

    assert losses(shared)[:4] == pytest.approx(losses(alone)[:4], abs=1e-4)
    first = [sorted(s["answer"] for s in _samples(config) if s["step"] == 1) for config in (alone, shared)]
    assert first[0] == first[1]


def test_a_rollout_goes_on_with_another_number_of_ranks(tmp_path: Path, alone: TrainConfig) -> None:
    parted = _config(tmp_path, "parallel.sharding=zero3", run="parted")
    _train(parted, 2, stop_signal=StopAfter(parted, 2))
    _train(parted, 4, stop_signal=StopAfter(parted, 5))

    assert losses(parted)[:4] == pytest.approx(losses(alone)[:4], abs=1e-4)


def test_actor_and_critic_are_exported_and_the_critic_says_its_values(tmp_path: Path) -> None:
    config = _config(tmp_path, "export.dtype=float32", "optimizer.lr=3e-2")
    _train(config)

    critic = RewardModel.open(Path(config.run) / "critic", torch.device("cpu"))
    (value,) = critic([_samples(config)[-1]["prompt"]], ["abc"])
    assert value != 0
    names = json.loads((Path(config.run) / "adapter" / "adapter_config.json").read_text())
    assert names["modules_to_save"] is None and "q_proj" in names["target_modules"]


def test_wrong_sections_are_refused_and_a_dry_run_counts_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not use ppo, which is for data.kind=prompts;"):
        _config(tmp_path, "data.kind=chat")
    with pytest.raises(ConfigError, match="grpo, which is for data.kind=prompts without ppo"):
        _config(tmp_path, "grpo.samples=4")
    with pytest.raises(ConfigError, match=r"give ppo.rewards"):
        _config(tmp_path, "ppo.rewards=[]")
    with pytest.raises(ValueError, match=r"ppo.minibatches=3 do not divide the 8 micro-batches"):
        _train(_config(tmp_path, "ppo.minibatches=3"))
    assert "4 sequences of 64 tokens = 256 tokens; 4 micro-batches" in dry_run(_config(tmp_path), {})


def test_rewards_rise_unless_answers_learn_from_each_others_rewards(tmp_path: Path) -> None:
    found = {}
    for shuffled, steps in ((False, 60), (True, 24)):
        config = _config(
            tmp_path,
            _HELD_OUT,
            "batch={sequences: 32, micro_sequences: 32}",
            "ppo={rewards: ['test_ppo_runs:early_letters'], answer_tokens: 8, beta: 0.0, epochs: 4}",
            f"ppo.shuffled={shuffled}",
            f"schedule={{steps: {steps}, warmup_steps: 0, kind: constant}}",
            "data.sequence_tokens=36",
            "evaluation={every: 4, sequences: 64}",
            "optimizer={lr: 3e-2, weight_decay: 0.0}",
            run=f"shuffled-{shuffled}",
        )
        _train(config)
        lines, samples = log_lines(config), _samples(config)
        curves = [[line[name] for line in lines if name in line] for name in ("reward", "held_out_reward")]
        found[shuffled] = [(mean(each[: len(each) // 4]), mean(each[-len(each) // 4 :])) for each in curves]
        assert all(sample["reward"] == early_letters([sample["answer"]])[0] for sample in samples)
        assert [len(each) for each in curves] == [steps, steps // 4]

    for (first, last), (_, of_control) in zip(found[False], found[True], strict=True):
        assert last > first + 0.1 and last > of_control + 0.07, found


def test_a_reward_that_fails_in_an_evaluation_ends_the_run_with_its_weights_saved(tmp_path: Path) -> None:
    rewards = "ppo.rewards=['test_ppo_runs:of_sixteen']"
    config = _config(tmp_path, _HELD_OUT, "ppo.samples=2", "evaluation.every=4", rewards)
    with pytest.raises(BrokenDataError, match=r"after step 4: the reward .* returned 0 numbers for 6.*step-00000004"):
        _train(config)


def test_ranks_share_an_evaluation(tmp_path: Path) -> None:
    steps = "schedule={steps: 2, warmup_steps: 0}"
    alone, shared = (_config(tmp_path, _HELD_OUT, "evaluation.every=2", steps, run=run) for run in ("alone", "shared"))
    _train(alone)
    _train(shared, 4)

    first, second = (log_lines(config)[-1] for config in (alone, shared))
    assert first["held_out_reward"] == pytest.approx(second["held_out_reward"]) != 0
    assert first["tokens"] == second["tokens"] == 6 and "held_out_loss" not in first
