"""``tightwire doctor MODEL``: formats, memory by the plan's own rules, a bound of the speed, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.model.family_models import make_family_folder
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny, tiny_config

from tightwire.bench.doctor import cli
from tightwire.bench.doctor import model as doctor
from tightwire.model.families import family_named
from tightwire.model.layout import make_layout
from tightwire.model.open import formats_of, open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights.formats import weight_bytes
from tightwire.server.config.serve import EngineOptions


@pytest.fixture(autouse=True)
def read_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_read_rate", lambda device: 1e9)


def test_a_packed_model_on_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "Q4_1", num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    assert cli.main([str(path), "--tp", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: Llama, ") and len(lines) < 25
    assert any(line.split()[:5] == ["attention", "8", "Q4_1", "8", "Q4_1"] for line in lines)
    assert any("--tp 4  cannot split 2 query heads over 4 ranks" in line for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("  --tp")] == ["1", "2", "3", "4"]
    assert any(
        "--tp 1" in line and " + process and steps 3" in line and "; cache with --kv-cache-dtype int8: " in line
        for line in lines
    )
    assert "tokens/s here for one request" in lines[-1] and "1.0 GB/s (a bound" in lines[-1]


def test_its_numbers_are_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", "Q8_0", head_dim=32)
    assert cli.main([str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checkpoint = open_checkpoint(str(path))
    config, formats = checkpoint.config, formats_of(checkpoint, "auto")
    for rank in report["ranks"]:
        layout = make_layout(config, rank["tp"])
        assert rank["weights_bytes"] == max(weight_bytes(config, shard, formats, 2) for shard in layout.shards)
        assert 300 << 20 < rank["other_bytes"] < 400 << 20  # a process, and a step of the tiny model
    kv_heads = max(shard.local_kv_heads for shard in make_layout(config, 2).shards)
    tokens = report["rank_context"]
    assert tokens == config.max_positions
    assert report["ranks"][1]["cache_bytes"] == 2 * 2 * kv_heads * config.head_dim * config.num_layers * tokens
    codes = 2 * kv_heads * (config.head_dim + 2) * config.num_layers * tokens  # a scale of two bytes for each head
    assert report["ranks"][1]["int8_cache_bytes"] == codes
    kinds = {kind["name"]: kind for kind in report["kinds"]}
    assert report["token_bytes"] == sum(kind["num_bytes"] for kind in report["kinds"]) - (
        0 if config.tied_embeddings else kinds["embedding"]["num_bytes"]
    )
    assert report["tokens_per_s"] == 1e9 / report["token_bytes"]


def test_floats_are_stored_and_kept_as_they_are_served(tmp_path: Path) -> None:
    kinds = {kind.name: kind for kind in doctor.examine_model(str(make_tiny(tmp_path / "m"))).kinds}
    assert kinds["MLP"].stored == {"F32": 6} and kinds["MLP"].in_memory == {"bfloat16": 6}


def test_a_prepared_folder_has_its_own_number_of_ranks(tmp_path: Path) -> None:
    job = PrepareOptions(tp=2, dtype="float32")
    prepare(open_checkpoint(str(make_tiny(tmp_path / "m"))), tmp_path / "out", job)
    assert [rank.tp for rank in doctor.examine_model(str(tmp_path / "out")).ranks] == [2]


def test_what_is_not_supported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_config(architectures=["MixtralForCausalLM"])))
    assert cli.main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "mixture of experts" in captured.err
    assert cli.main([str(folder), "--json"]) == 2
    assert "mixture of experts" in json.loads(capsys.readouterr().out)["unsupported"]


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("generation_config.json", '{"temperature": -1}', "generation_config.json: temperature: .* got -1"),
        ("chat_template.jinja", "{% for", "chat_template.jinja: line 1 of the chat template cannot be compiled"),
    ],
)
def test_what_serve_refuses_is_not_approved(tmp_path: Path, file: str, text: str, reason: str) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / file).write_text(text)
    assert re.search(reason, doctor.examine_model(str(folder)).unsupported)


def test_an_empty_name_is_refused_as_serve_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([""]) == 2
    assert "--model must be a name, a path or random:SHAPE, got ''" in capsys.readouterr().err


def test_the_read_rate_is_measured_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 1e8 < doctor.measure_read_rate("cpu") < 1e13


def test_blocks_are_shown_by_kind_of_layer_for_a_model_with_windows(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_position_embeddings": 8192, "sliding_window": 512}
    make_family_folder(family_named("Gemma 3"), tmp_path, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_tiny(tmp_path / "tiny") / name, tmp_path)
    report = doctor.examine_model(str(tmp_path))
    shown = "\n".join(doctor.describe_model(report))
    assert shown.count("tokens takes 512 for layers that attend to all tokens and at most ") == 1
    assert "for those with a window of 512 (a block: 16 tokens, 1 layers)" in shown
    most = EngineOptions().max_num_batched_tokens + 512 + 62
    blocks = 512 + 5 * min(512, -(-most // 16))
    assert report.ranks[0].cache_bytes == blocks * 16 * 2 * 2 * 32 * 2
