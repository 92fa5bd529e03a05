"""Metadata of a .gguf that only some families have: which layers have a window, and YaRN's factors."""

import math
from pathlib import Path

import pytest
from helpers.model.broken_gguf import Parts, number, numbers, text

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.checkpoint.gguf_config import config_from_gguf


def config_of(path: Path, arch: str, **keys: bytes) -> LlamaConfig:
    """The configuration of the tiny model's file, as one of architecture ``arch`` with further keys."""
    parts = Parts.of_tiny(path)
    parts.keys = [(name.replace("llama.", f"{arch}."), value) for name, value in parts.keys]
    parts.set("general.architecture", text(arch))
    for name, value in keys.items():
        parts.set(f"{arch}.{name.replace('__', '.')}", value)
    path.write_bytes(parts.to_bytes())
    return config_from_gguf(GgufFile(path))


@pytest.mark.parametrize(
    ("arch", "pattern", "sliding"),
    [
        ("olmo2", None, (0, 1)),  # three of four layers
        ("olmo2", numbers([0, 1]), (1,)),
        ("olmo2", numbers([0, 0]), ()),
        ("gemma2", None, (0,)),
        ("gemma2", number(1), ()),  # as in llama.cpp, the last one of each layer has none
        ("gemma2", number(6), (0, 1)),
        ("phi3", None, (0, 1)),  # all
    ],
)
def test_the_file_says_which_layers_have_a_window(
    arch: str, pattern: bytes | None, sliding: tuple[int, ...], tmp_path: Path
) -> None:
    given = {"attention__sliding_window": number(20)}
    given |= {} if pattern is None else {"attention__sliding_window_pattern": pattern}
    config = config_of(tmp_path / "m.gguf", arch, **given)
    assert (config.window, config.sliding) == (20, sliding)


def test_the_first_files_of_gemma2_leave_out_its_caps_and_window(tmp_path: Path) -> None:
    config = config_of(tmp_path / "m.gguf", "gemma2")
    assert (config.score_cap, config.logits_cap, config.window, config.sliding) == (50.0, 30.0, 4096, (0,))
    caps = {f"{name}_logit_softcapping": number(size, "f") for name, size in (("attn", 20.0), ("final", 10.0))}
    config = config_of(tmp_path / "n.gguf", "gemma2", **caps)
    assert (config.score_cap, config.logits_cap) == (20.0, 10.0)


def test_a_pattern_of_too_few_layers_is_refused(tmp_path: Path) -> None:
    given = {"attention__sliding_window": number(20), "attention__sliding_window_pattern": numbers([1])}
    with pytest.raises(ModelError, match=r"m\.gguf: its metadata is damaged"):
        config_of(tmp_path / "m.gguf", "olmo2", **given)


def test_temperatures_of_attention_limit_the_context_to_where_they_are_1(tmp_path: Path) -> None:
    given = {"attention__temperature_scale": number(0.1, "f"), "rope__scaling__original_context_length": number(64)}
    assert config_of(tmp_path / "m.gguf", "mistral3", **given).max_positions == 64
    given["attention__temperature_scale"] = number(0.0, "f")
    assert config_of(tmp_path / "m.gguf", "mistral3", **given).max_positions == 512


@pytest.mark.parametrize("kind", [None, "longrope"])
def test_a_longer_context_without_its_factors_is_refused(kind: str | None, tmp_path: Path) -> None:
    given = {"rope__scaling__original_context_length": number(64)}
    given |= {"rope__scaling__type": text(kind), "rope__scaling__factor": number(8.0, "f")} if kind else {}
    with pytest.raises(
        ModelError, match=r"rope_factors_short\.weight is missing: how 64 positions became 512; convert"
    ):
        config_of(tmp_path / "m.gguf", "phi3", **given)
    given["rope__scaling__original_context_length"] = number(512)
    assert config_of(tmp_path / "m.gguf", "phi3", **given).rope_scaling == RopeScaling()


@pytest.mark.parametrize(
    ("multiplier", "factor"),
    [(None, 1 + 0.1 * math.log(16)), (1.0, 1.0), (0.5, (1 + 0.1 * math.log(16)) / (1 + 0.05 * math.log(16)))],
)
def test_yarn_multiplies_by_what_the_file_leaves_of_its_own_factor(
    multiplier: float | None, factor: float, tmp_path: Path
) -> None:
    given = {
        "rope__scaling__type": text("yarn"),
        "rope__scaling__factor": number(16.0, "f"),
        "rope__scaling__original_context_length": number(64),
    }
    given |= {} if multiplier is None else {"rope__scaling__yarn_log_multiplier": number(multiplier, "f")}
    config = config_of(tmp_path / "m.gguf", "mistral3", **given)
    assert config.rope_scaling.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(("arch", "factor"), [("olmo2", 1.25), ("llama", 1.25 * (1 + 0.1 * math.log(8)))])
def test_olmo_has_the_whole_factor_of_attention_and_others_what_multiplies_the_usual_one(
    arch: str, factor: float, tmp_path: Path
) -> None:
    given = {
        "rope__scaling__type": text("yarn"),
        "rope__scaling__factor": number(8.0, "f"),
        "rope__scaling__original_context_length": number(64),
        "rope__scaling__attn_factor": number(1.25, "f"),
    }
    config = config_of(tmp_path / "m.gguf", arch, **given)
    assert config.rope_scaling.attention_factor == pytest.approx(factor)
