"""Reading a configuration: a file and overrides become one tree; all invalid values are named at once."""

from pathlib import Path

import pytest
import yaml
from helpers.training.training_runs import write_config

from tightwire.training.config.read import EXAMPLES, ConfigError, describe_config, read_config


def _refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_config(path, overrides)
    return str(error.value)


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    config = read_config(
        write_config(tmp_path),
        ["optimizer.lr=3e-4", "parallel.between.kind=top-k", "evaluation.prompts=[a, b]", "seed=3"],
    )

    assert (config.optimizer.lr, config.seed, config.evaluation.prompts) == (3e-4, 3, ["a", "b"])
    assert config.parallel.between.kind == "top-k"
    assert config.data.sequence_tokens == 16  # the file's own
    assert read_config(write_config(tmp_path), ["optimizer.options.eps=1e-8"]).optimizer.options["eps"] == 1e-8


def test_text_that_begins_like_a_number_is_text(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace(f"run: {tmp_path}/run", "run: 3e8f2a"))
    assert read_config(path).run == "3e8f2a"
    assert read_config(path, ["run=1e-4-clipped", "schedule.steps=1e3"]).run == "1e-4-clipped"


def test_unknown_keys_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    message = _refused(
        write_config(tmp_path), "optimizer.lrr=1", "steps=3", "parallel.between={kind: dgc, sparsitty: 0}"
    )

    assert "unknown key optimizer.lrr; did you mean 'optimizer.lr'?" in message
    assert "unknown key steps; did you mean 'schedule.steps'?" in message
    assert "unknown key parallel.between.sparsitty; did you mean 'parallel.between.sparsity'?" in message


def test_dgc_refuses_other_optimizers_and_a_second_momentum(tmp_path: Path) -> None:
    path, dgc = write_config(tmp_path), "parallel.between.kind=dgc"

    assert "optimizer.name is adamw: use optimizer.name=sgd, or parallel.between.kind=top-k" in _refused(path, dgc)
    momentum = _refused(path, dgc, "optimizer.name=sgd", "optimizer.options.momentum=0.9", "optimizer.weight_decay=0")
    assert "set parallel.between.momentum" in momentum
    assert "set parallel.between.weight_decay" in _refused(path, dgc, "optimizer.name=sgd")
    sgd = ("optimizer.name=sgd", "optimizer.weight_decay=0", "optimizer.options.dampening=0.5")
    assert "remove optimizer.options.dampening" in _refused(path, dgc, *sgd)


def test_unsupported_weight_decay_is_off_by_default_and_refused_when_set(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    dgc = ("parallel.between.kind=dgc", "optimizer.name=sgd", "optimizer.weight_decay=0")

    assert read_config(path).optimizer.clip_norm == 1.0
    assert read_config(path, dgc).optimizer.clip_norm is None
    assert "set parallel.between.clip_norm and remove optimizer.clip_norm" in _refused(
        path, *dgc, "optimizer.clip_norm=1"
    )
    assert read_config(path, ["optimizer.name=rprop"]).optimizer.weight_decay == 0
    assert "Rprop has no weight decay" in _refused(path, "optimizer.name=rprop", "optimizer.weight_decay=0.1")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.name=muon", "Muon does not work on shards: it needs whole matrices"),
        ("optimizer.name=adamv", "there is no optimizer 'adamv'; choose one of"),
        ("schedule.warmup_steps=99", "warmup_steps=99 are more than steps=6"),
        ("model.start=smollm2-135m", "give either start"),
        ("model.tokenizer=bpe:many", "write bpe:4096"),
        ("data.held_out=1.5", "data.held_out: Input should be less than 1"),
        ("parallel.between.momentum=0.9", "parallel.between.kind is missing"),
        ("parallel.between={kind: dgc, nesterov: true, momentum: 0}", "nesterov needs a momentum above 0"),
        ("parallel.between.kind=sparse", "parallel.between: Input tag 'sparse' found"),
        ("nonsense", "write key=value"),
        ("optimizer.lr=[", "the value is not YAML"),
        ("run=2026-13-01", "'run=2026-13-01': the value is not YAML: month must be in 1..12"),
        (f"run={1000 * '['}", "the value is not YAML: maximum recursion depth"),
        ("optimizer.lr=.inf", "optimizer.lr: Input should be a finite number"),
        ("parallel.timeout_s=.inf", "parallel.timeout_s: Input should be a finite number"),
        ("parallel.between={kind: dgc, weight_decay: .inf}", "parallel.between.weight_decay: Input should be a finite"),
        ("model.dtype=float32", "unknown key model.dtype; model has start, shape, tokenizer, compute_dtype"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate; optimizer has name, lr"),
        ("model.shape.hiden_size=4", "unknown key model.shape.hiden_size; did you mean 'model.shape.hidden_size'?"),
        ("model.shape.hidden_size=true", "model.shape: hidden_size must not be true or false, got True"),
        ("schedule.steps=true", "schedule: steps must not be true or false, got True"),
        ("optimizer.lr=yes", "optimizer: lr must not be true or false, got True"),
        ("seed=false", "seed must not be true or false, got False"),
        ("model.layers=[0, true]", "model: layers must not be true or false"),
        ("parallel.between={kind: top-k, sparsity: [0.9, false]}", "parallel.between: sparsity must not be true"),
        ("parallel.checkpoint_blocks=-1", "parallel.checkpoint_blocks: Input should be greater than or equal to 0"),
        ("parallel.timeout_s=1e10", "parallel.timeout_s: Input should be less than or equal to 1000000000"),
        ("optimizer.lr=1e-3x", "optimizer.lr: Input should be a valid number"),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, override: str, words: str) -> None:
    assert words in _refused(write_config(tmp_path), override)


def test_a_reward_model_continues_no_prompts(tmp_path: Path) -> None:
    path, reward = write_config(tmp_path), ["model={start: x, lora: {}, head: reward}", "data.kind=preferences"]
    assert read_config(path, reward).head == "reward"
    words = "this run does not use evaluation.prompts, which is for text, chat, distill and DPO; remove it"
    assert words in _refused(path, *reward, "evaluation.prompts=[Hi]")


def test_a_run_of_prompts_continues_none_in_evaluations(tmp_path: Path) -> None:
    grpo = "model={start: x, lora: {}}", "data.kind=prompts", "grpo.rewards=[a:b]"
    assert "not use evaluation.prompts, which is for" in _refused(
        write_config(tmp_path), *grpo, "evaluation.prompts=[Hi]"
    )


def test_a_codec_of_frozen_weights_needs_some(tmp_path: Path) -> None:
    path, codec = write_config(tmp_path), "parallel={sharding: zero3, frozen_codec: int8}"
    assert "parallel.frozen_codec is for frozen weights, and this run has none; remove it" in _refused(path, codec)
    assert read_config(path, [codec, "model.frozen=['*embed*']"]).parallel.frozen_codec == "int8"


def test_a_way_to_clip_needs_a_norm(tmp_path: Path) -> None:
    path, way = write_config(tmp_path), "parallel={sharding: hybrid, between: {kind: top-k, clip: global}}"
    assert "parallel: between.clip=global says how between.clip_norm clips, which is not given" in _refused(path, way)
    assert read_config(path, [way, "parallel.between.clip_norm=1.0"]).parallel.between.takes_all_sums


def test_files_that_are_not_configurations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("run: a\nmodel:\n  start: x\n  start: y\n")
    assert "start appears twice" in _refused(path)
    path.write_text("run: a\nmodel: &a {shape: *a}\n")
    assert "unconstructable recursive node" in _refused(path)
    path.write_text("run: a\noptimizer: {options: {betas: &a [*a]}}\n")
    assert "unconstructable recursive node" in _refused(path)
    path.write_text("run: 2026-02-30\n")
    assert f"{path}: cannot be read: day is out of range for month" in _refused(path)
    path.write_text("- a list")
    assert "must contain `key: value` lines" in _refused(path)
    assert "no such file" in _refused(tmp_path / "none.yaml")


@pytest.mark.parametrize(("world_size", "steps"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(tmp_path: Path, world_size: int, steps: int) -> None:
    assert read_config(write_config(tmp_path)).batch.accumulation(world_size) == steps


def test_ranks_that_do_not_divide_a_step_are_refused(tmp_path: Path) -> None:
    batch = read_config(write_config(tmp_path)).batch
    with pytest.raises(ValueError, match=r"cannot be divided over 3 ranks.*multiple of 6; give batch.sequences=6"):
        batch.accumulation(3)


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_examples_are_read_by_name(example: str) -> None:
    assert read_config(Path(example)).schedule.steps > 0


@pytest.mark.parametrize("example", sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
def test_the_file_that_a_run_writes_is_read_as_the_same_configuration(tmp_path: Path, example: str) -> None:
    overrides = ["data.held_out_files=[held/*.jsonl]"] if example == "grpo" else []  # beside the default of held_out
    config = read_config(example, overrides)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert read_config(path) == config


def test_no_prompts_are_held_out_unless_asked() -> None:
    assert read_config("grpo").data.held_out == 0 != read_config("sft").data.held_out
    assert read_config("grpo", ["data.held_out=0.2"]).data.held_out == 0.2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["dpo.beta=0.5"], "not use dpo, which is for data.kind=preferences with model.head=tokens"),
        (["grpo.samples=4"], "not use grpo, which is for data.kind=prompts without ppo"),
        (["rollout.tp=2"], "not use rollout, which is for data.kind=prompts"),
        (["ppo.samples=4"], "not use ppo, which is for data.kind=prompts"),
        (
            ["model={start: x, lora: {}, head: reward}", "data.kind=preferences", "dpo.beta=0.5"],
            "this run does not use dpo",
        ),
        (["data.kind=chat", "data.text_key=body"], "not use data.text_key, which is for data.kind=text; remove it"),
        (["data.kind=chat", "data.parted_by=file"], "not use data.parted_by, which is for data.kind=text"),
        (
            ["schedule.kind=constant", "schedule.final_share=0.3"],
            "which is for schedule.kind=linear and cosine; remove it, or override it with schedule.final_share=0.1",
        ),
    ],
)
def test_what_this_run_would_not_use_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in _refused(write_config(tmp_path), *overrides)


def test_every_key_is_listed() -> None:
    text = describe_config()
    assert "optimizer.lr (0.0003): peak learning rate" in text
    assert "data.files (required)" in text
