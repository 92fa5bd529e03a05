"""Runs of GRPO whose answers come from the server's engine in the same process."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training.training_runs import StopAfter, log_lines, losses, make_config, make_prompt_config, train
from tiny import VARIANTS

from tightwire import run_page
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.errors import ModelError
from tightwire.post_training import make_engines
from tightwire.rollout_engine import RolloutEngine
from tightwire.run_page import SAMPLES
from tightwire.training.checkpoint.folders import OtherRunError, checkpoints_in
from tightwire.training.config.learning import PpoConfig
from tightwire.training.config.read import ConfigError
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError
from tightwire.training.run import rollouts
from tightwire.training.run.loop import BrokenDataError, DivergedError
from tightwire.training.run.rollouts import find_reward
from tightwire.training.start.reward import RewardModel

_SAMPLES = 4


def count_es(prompts: Any, completions: list[str], offset: list[int], **_: Any) -> list[float]:
    """A reward: the share of e in the text, with what the line says of it."""
    assert len(prompts) == len(completions) == len(offset)
    return [
        sum(letter < "p" for letter in text) / max(1, len(text)) + own
        for text, own in zip(completions, offset, strict=True)
    ]


def fails_in_the_third_call(completions: list[str], **_: Any) -> list[float]:
    _calls.append(len(completions))
    if len(_calls) == 3:
        raise RuntimeError("no such word")
    return [float(len(text)) for text in completions]


_calls: list[int] = []


def writes_to_what_it_gets(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    for prompt, text in zip(prompts, completions, strict=True):
        prompt.append({"role": "assistant", "content": text})
    return [float(len(prompt)) for prompt in prompts]


def returns_nan(completions: list[str], **_: Any) -> list[float]:
    return [float("nan")] * len(completions)


def returns_too_much(completions: list[str], **_: Any) -> list[float]:
    return [-1e308] * len(completions)


def returns_too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


def ends_the_program(completions: list[str], **_: Any) -> list[float]:
    sys.exit(3)


def says_the_same(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


_CAPPED = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 3.0}


def _config(
    folder: Path,
    *overrides: str,
    reward: str = "count_es",
    run: str = "run",
    shape: Mapping[str, Any] = VARIANTS["odd-heads"],
) -> TrainConfig:
    return make_prompt_config(
        folder,
        "batch={sequences: 4, micro_sequences: 1}",
        f"grpo={{rewards: ['test_grpo_runs:{reward}'], samples: {_SAMPLES}, answer_tokens: 8, beta: 0.1}}",
        *overrides,
        shape=shape,
        run=run,
    )


def _train(config: TrainConfig, world_size: int = 1, **options: Any) -> None:
    train(config, world_size, engines=make_engines(), **options)


def _samples(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.run) / SAMPLES).read_text().splitlines()]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_trainer_and_engine_agree_in_float32_and_every_sample_is_kept(tmp_path: Path, temperature: float) -> None:
    config = _config(tmp_path, f"grpo.temperature={temperature}")
    _train(config)

    lines, samples = log_lines(config), _samples(config)
    assert len(lines) == 6 and len(samples) == 6 * 4 * _SAMPLES
    # The ratio of both probabilities is 1, at the first step and with each later version of the adapter.
    assert all(line["mismatch"] < 1e-5 and 0 <= line["mismatch_kl"] < 1e-6 for line in lines)
    assert all(line["clipped"] == line["truncated"] == 0 for line in lines)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-7) and lines[-1]["kl"] > 1e-5
    for line in lines:
        own = [sample for sample in samples if sample["step"] == line["step"]]
        assert line["reward"] == pytest.approx(sum(sample["reward"] for sample in own) / len(own))
        assert all(0 < sample["tokens"] <= 8 for sample in own)
    assert lines[0]["grad_norm"] > 0


def test_a_stopped_run_resumes_to_the_bit_and_ranks_draw_the_same(tmp_path: Path) -> None:
    alone, parted = _config(tmp_path, run="alone"), _config(tmp_path, run="parted")
    shared = _config(tmp_path, "parallel.sharding=zero3", run="shared")
    _train(alone)
    _train(parted, stop_signal=StopAfter(parted, 3))
    assert {sample["step"] for sample in _samples(parted)} == {1, 2, 3}  # the next step's prompts were not answered
    _train(parted)
    _train(shared, 2, stop_signal=StopAfter(shared, 2))  # the ranks' later answers may differ

    assert losses(parted) == losses(alone)
    assert _samples(parted) == _samples(alone)
    first = [sorted(s["answer"] for s in _samples(config) if s["step"] == 1) for config in (alone, shared)]
    assert first[0] == first[1]
    assert losses(shared)[0] == pytest.approx(losses(alone)[0], abs=1e-5)


@pytest.mark.parametrize(("num_ranks", "num_nodes", "tp"), [(2, 1, 2), (4, 2, 2), (4, 2, 4)])
def test_ranks_that_answer_together_answer_as_one(tmp_path: Path, num_ranks: int, num_nodes: int, tp: int) -> None:
    configs = [_config(tmp_path, f"rollout.tp={each}", "schedule.steps=2", run=str(each)) for each in (1, tp)]
    for config in configs:
        _train(config, num_ranks, num_nodes=num_nodes)

    first = [[s["answer"] for s in _samples(config) if s["step"] == 1] for config in configs]
    assert first[0] == first[1] and len(first[0]) == 4 * _SAMPLES
    assert all(line["mismatch"] < 1e-5 for config in configs for line in log_lines(config))
    assert [log_lines(config)[0]["answer_wire_bytes"] > 0 for config in configs] == [False, True]


def test_what_the_allreduce_of_answers_rounds_is_logged(tmp_path: Path) -> None:
    found = []
    arms = [(name, "float32") for name in ("auto", "flash-int8", "flash-int4", "flash-int3")]
    for name, dtype in [*arms, ("auto", "bfloat16")]:
        sums = f"rollout={{tp: 2, allreduce: {name}, allreduce_decode: {name}}}", f"model.compute_dtype={dtype}"
        config = _config(tmp_path, *sums, "schedule.steps=2", run=f"{name}-{dtype}")
        _train(config, 2)
        found.append([line["mismatch_kl"] for line in log_lines(config)])

    for exact, eight, four, three, rounded in zip(*found, strict=True):
        assert exact < 1e-6 < eight < four / 4 < three / 8
        assert 1e-6 < rounded < three / 10
    prompts_alone = _config(tmp_path, "rollout={tp: 2, allreduce: flash-int3}", "schedule.steps=2", run="prompts")
    _train(prompts_alone, 2)
    assert found[0][0] < log_lines(prompts_alone)[0]["mismatch_kl"] < found[3][0]


def test_a_rollout_does_not_go_on_with_other_batches(tmp_path: Path) -> None:
    config = _config(tmp_path, "grpo.updates=3")
    _train(config, stop_signal=StopAfter(config, 2))
    others = ("batch.sequences", 4, 8), ("grpo.samples", _SAMPLES, 2), ("grpo.updates", 3, 2)
    for key, own, other in (*others, ("grpo.temperature", 1.0, 0.5)):
        words = f"answers that the next steps learn from, and {key.removeprefix('grpo.')} is {own} in the checkpoint and {other} here"
        with pytest.raises(OtherRunError, match=words):
            _train(_config(tmp_path, "grpo.updates=3", f"{key}={other}"))
    _train(_config(tmp_path, "grpo.updates=3", "batch.micro_sequences=2", "schedule.steps=3"))


def test_answers_of_several_updates_move_away_from_ratio_one(tmp_path: Path) -> None:
    config = _config(tmp_path, "grpo.updates=3", "grpo.clip=0.001", "optimizer.lr=3e-2")
    _train(config)

    lines = log_lines(config)
    assert [line["clipped"] > 0 for line in lines] == [False, True, True, False, True, True]
    assert {sample["step"] for sample in _samples(config)} == {1, 4}


def test_capped_logits_are_tempered_behind_the_cap(tmp_path: Path) -> None:
    config = _config(tmp_path, "grpo.temperature=0.5", "schedule.steps=2", shape=_CAPPED)
    _train(config)

    assert all(line["mismatch"] < 1e-5 for line in log_lines(config))


@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_the_folder_of_a_reward_model_is_a_reward(
    tmp_path: Path, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    turns = (("prompt", "user", "say {}"), ("chosen", "assistant", "yes {}"), ("rejected", "assistant", "no, never {}"))
    pairs = [{key: [{"role": role, "content": text.format(i)}] for key, role, text in turns} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    train(
        make_config(
            tmp_path,
            f"model={{start: {config.model.start}, lora: {{rank: 4}}, head: reward}}",
            f"data={{files: [{tmp_path / 'pairs.jsonl'}], kind: preferences, sequence_tokens: 48}}",
            "export.dtype=float32",
            run="judge",
        )
    )
    judge = tmp_path / "judge" / "adapter"

    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["~/judge/adapter", "test_grpo_runs:count_es"]
    own = config.grpo if section == "grpo" else PpoConfig(answer_tokens=8)
    config = config.model_copy(update={section: own.model_copy(update={"rewards": names})})
    onto_it = config.export.model_copy(update={"folder": str(judge)})
    with pytest.raises(ValueError, match=r"export.folder: .* has the model ~/judge/adapter, which this run reads"):
        _train(config.model_copy(update={"export": onto_it}))
    _train(config)

    asked = RewardModel.open(judge, torch.device("cpu"))
    samples = _samples(config)
    assert all(sample["reward"] == sum(sample["rewards"].values()) for sample in samples)
    assert len({sample["rewards"][names[0]] for sample in samples}) > len(samples) // 2
    sample = samples[-1]
    assert asked([sample["prompt"]], [sample["answer"]]) == [pytest.approx(sample["rewards"][names[0]], abs=1e-5)]


def test_groups_with_equal_rewards_change_nothing(tmp_path: Path) -> None:
    config = _config(tmp_path, "schedule.steps=2", reward="says_the_same")
    _train(config, 2)

    assert [(line["loss"], line["grad_norm"], line["even_groups"]) for line in log_lines(config)] == [(0, 0, 1)] * 2


def test_a_reward_that_writes_to_a_prompt_changes_it_for_no_other_answer(tmp_path: Path) -> None:
    _train(config := _config(tmp_path, "schedule={steps: 1, warmup_steps: 0}", reward="writes_to_what_it_gets"))
    assert {(sample["reward"], len(sample["prompt"])) for sample in _samples(config)} == {(2.0, 1)}


def test_scores_that_are_not_finite_end_the_run_and_the_checkpoint_before_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ruinous = "optimizer={lr: 1e30, clip_norm: null}", "schedule.warmup_steps=0"
    with pytest.raises(
        DivergedError, match=r"after step 1: .* scores .* not finite .*; there is no checkpoint yet. The"
    ):
        _train(_config(tmp_path, *ruinous), 2)

    answer, asked = RolloutEngine.answer, []

    def fail(engine: RolloutEngine, *given: Any) -> Any:
        asked.append(1)
        if len(asked) == 6:  # of one rank, in the third step
            raise ModelError("not finite")
        return answer(engine, *given)

    monkeypatch.setattr(RolloutEngine, "answer", fail)
    config = _config(tmp_path, "checkpoint.every=1", run="late")
    with pytest.raises(
        DivergedError, match="after step 2: not finite; the last good checkpoint is .*step-00000001. The"
    ):
        _train(config, 2)
    assert [path.name for path in checkpoints_in(tmp_path / "late")] == ["step-00000001"]


def test_a_reward_that_fails_ends_the_run_with_its_weights_saved(tmp_path: Path) -> None:
    _calls.clear()
    config = _config(tmp_path, reward="fails_in_the_third_call")
    with pytest.raises(
        BrokenDataError, match=r"after step 2: the reward test_grpo_runs:fails.* failed: .*no such word.*step-00000002"
    ):
        _train(config)
    _train(config)  # later calls do not fail

    assert len(log_lines(config)) == 6


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("returns_nan", "is nan for the answer"),
        ("returns_too_much", "is -1e.308 for the answer .*; the most is 1e15"),
        ("returns_too_few", "returned 1 numbers for 16 answers"),
        ("ends_the_program", r"failed: SystemExit\(3\)"),
    ],
)
def test_wrong_rewards_are_named(tmp_path: Path, reward: str, message: str) -> None:
    with pytest.raises(DataError, match=f"the reward test_grpo_runs:{reward} {message}"):
        _train(_config(tmp_path, reward=reward))


def test_answers_that_a_full_disk_does_not_take_are_named_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_lines(path: Path, records: list[dict[str, Any]]) -> None:
        if records[0]["step"] == 2:
            raise OSError(28, "No space left on device")
        run_page.add_lines(path, records)

    monkeypatch.setattr(rollouts, "add_lines", add_lines)
    config = _config(tmp_path, "schedule={steps: 3, warmup_steps: 0}")
    _train(config, 2)
    assert len(log_lines(config)) == 3 and {sample["step"] for sample in _samples(config)} == {1, 3}
    assert f"WARNING: {tmp_path}/run/{SAMPLES} misses the answers of step 2: [Errno 28]" in capsys.readouterr().err


def test_missing_rewards_prompts_and_room_are_refused(tmp_path: Path) -> None:
    for name, message in (("no_module:f", "cannot be imported"), ("test_grpo_runs:_SAMPLES", "neither a function")):
        with pytest.raises(ValueError, match=message):
            find_reward(name, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="give grpo.rewards"):
        _config(tmp_path, "grpo.rewards=[]")
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        _config(tmp_path, "grpo.answer_tokens=64")
    with pytest.raises(ConfigError, match="unknown all-reduce 'flash-int2'; choose one of"):
        _config(tmp_path, "rollout={tp: 2, allreduce: flash-int2}")
    with pytest.raises(ConfigError, match="give tp, their number"):
        _config(tmp_path, "rollout.allreduce=flash-int4")
    with pytest.raises(ValueError, match=r"rollout.tp=3: these ranks can answer in groups of \[1, 2, 4\]"):
        _config(tmp_path, "rollout.tp=3").check_ranks(Topology(0, 4, num_nodes=2))
    with pytest.raises(ConfigError, match="an adapter without dropout"):
        _config(tmp_path, "model.lora={dropout: 0.1}")
    with pytest.raises(
        DataError, match=r"prompts.jsonl:\d+: a prompt of \d+ tokens and an answer of .*=60 are more than"
    ):
        _train(_config(tmp_path, "grpo.answer_tokens=60"))
    path = tmp_path / "prompts.jsonl"
    for line, message in (
        ({"prompt": []}, "has no messages"),
        ({"prompt": [{"role": "user", "content": " "}]}, "not empty"),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(DataError, match=message):
            _train(_config(tmp_path, run="other"))
