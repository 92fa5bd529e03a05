"""The slots that ranks reserve for adapters: their number, their rank, their memory, and what is refused before loading."""

import re
from pathlib import Path

import pytest
from helpers.model.lora import make_adapter
from tiny import make_tiny

from tightwire.model.adapters.product import AdapterRoom, adapter_bytes
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.progress import Progress
from tightwire.server.cli.explain import explain
from tightwire.server.config.flags import make_config
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.plan.run_plan import plan_adapters, prepare
from tightwire.sizes import format_bytes


def test_slots_follow_the_flags(tmp_path: Path) -> None:
    config = open_checkpoint(str(make_tiny(tmp_path / "model"))).config
    a, b = (make_adapter(tmp_path / name, config, rank=rank) for name, rank in (("a", 3), ("b", 20)))
    named = (f"a={a}", f"b={b}")
    assert plan_adapters(AdapterOptions(), config) is None
    plan = plan_adapters(AdapterOptions(lora=named), config)
    assert plan is not None and (plan.num_slots, plan.max_rank) == (2, 20)
    assert [(each.id, each.slot, each.name) for each in plan.loaded] == [(1, 0, "a"), (2, 1, "b")]
    assert plan.loaded[0].digest != plan.loaded[1].digest
    plan = plan_adapters(AdapterOptions(lora=named[:1], lora_dir=str(tmp_path)), config)
    assert plan is not None and (plan.num_slots, plan.max_rank) == (4, 16)
    with pytest.raises(ValueError, match="--max-lora-rank 8: adapter 'b' has rank 20; give that or more"):
        plan_adapters(AdapterOptions(lora=named, max_lora_rank=8), config)
    with pytest.raises(ModelError, match="has no adapter_config.json"):
        plan_adapters(AdapterOptions(lora=(f"x={tmp_path}",)), config)
    with pytest.raises(ModelError, match="~no-such-user/x: has no adapter_config.json"):
        plan_adapters(AdapterOptions(lora=("x=~no-such-user/x",)), config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora": ("a",)}, "--lora must be NAME=FOLDER, got 'a'"),
        ({"lora": ("=x",)}, "--lora must be NAME=FOLDER"),
        ({"lora": ("a=x", "a=y")}, "--lora must be one folder for each name, got 'a'"),
        ({"lora": ("a=x", "b=y"), "max_loras": 1}, "--max-loras must be at least 2, the number of --lora, got 1"),
        ({"max_loras": 3}, "--max-loras must be left out without --lora and --lora-dir, got 3"),
        ({"lora_dir": ""}, "--lora-dir must be left out, or not empty"),
    ],
)
def test_flags_that_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        AdapterOptions(**given)  # pyright: ignore[reportArgumentType]


def test_the_budget_and_explain_count_the_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny(tmp_path / "model")
    given = {
        "model": str(model),
        "tp": 2,
        "lora_dir": str(tmp_path),
        "max_loras": 3,
        "max_lora_rank": 8,
        "device": "cpu",
    }
    checkpoint, decision = prepare(make_config(given), Progress())
    layout = make_layout(checkpoint.config, 2)
    sizes = [adapter_bytes(checkpoint.config, shard, AdapterRoom(3, 8), 2) for shard in layout.shards]
    assert [rank.adapters for rank in decision.budget.ranks] == sizes
    _, plain = prepare(make_config({"model": str(model), "tp": 2, "device": "cpu"}), Progress())
    assert [
        own.fixed - other.fixed for own, other in zip(decision.budget.ranks, plain.budget.ranks, strict=True)
    ] == sizes
    assert "adapters" in decision.budget.table() and "adapters" not in plain.budget.table()
    flags = [str(model), "--tp", "2", "--lora-dir", str(tmp_path), "--max-loras", "3", "--max-lora-rank", "8"]
    assert explain([*flags, "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"adapters: 3 slots for rank 8, {' and '.join(map(format_bytes, sizes))} a rank, loaded: none" in said
