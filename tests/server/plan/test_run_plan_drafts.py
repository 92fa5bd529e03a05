"""Plans with a draft model: the memory that it takes on rank 0, and what is refused before anything starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny

from tightwire.comm.group.group import in_process_groups
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.prepare import PrepareOptions
from tightwire.model.prepare import prepare as make_prepared
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.progress import Progress
from tightwire.server.config.flags import make_config
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.plan import run_plan, setting
from tightwire.server.plan.run_plan import prepare
from tightwire.server.plan.setting import choose_activations


def plan_of(model: Path, draft: Path | None, **options: Any) -> Any:
    given = {"model": str(model), "device": "cpu", "tp": 2, "kv_cache_memory": 1 << 20, **options}
    if draft is not None:
        given |= {"speculation": "draft", "draft_model": str(draft)}
    return prepare(make_config(given), Progress())[1]


@pytest.fixture(name="model")
def fixture_model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


def test_rank_0_has_the_draft_model_and_its_cache_to_the_byte(model: Path, tmp_path: Path) -> None:
    draft = make_tiny(tmp_path / "draft", num_hidden_layers=1, max_position_embeddings=512)
    decision, plain = plan_of(model, draft), plan_of(model, None)
    checkpoint, plan = open_checkpoint(str(draft)), decision.plan
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "auto")
    runner = build_runner(
        checkpoint.config,
        checkpoint.reader(),
        split_model(checkpoint.config, formats, 1),
        RankGroups(in_process_groups(1)[0]),
        RunnerOptions(
            dtype=getattr(torch, plan.dtype), max_model_len=64, num_blocks=plan.num_blocks, block_size=BLOCK_SIZE
        ),
    )
    cache = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in runner.cache.layer(0)}
    (first, second), (alone, _) = decision.budget.ranks, plain.budget.ranks
    assert second == plain.budget.ranks[1] and second.draft == 0 < first.draft
    assert (first.block - alone.block) * plan.num_blocks == sum(cache.values())
    assert decision.budget.cache_bytes(first) <= 1 << 20, "--kv-cache-memory is for both caches"
    assert plan.draft == checkpoint.location and not plain.plan.draft
    assert "draft model" in decision.budget.table() and "draft model" not in plain.budget.table()
    assert (
        f"speculation: rank 0 drafts with {checkpoint.name} (made for 512 tokens, activations in float)"
        in decision.summary()
    )
    runner.close()


def test_replicas_have_one_draft_model_with_a_cache_for_all(model: Path) -> None:
    one, two = (plan_of(model, model, dp=dp).budget.ranks for dp in (1, 2))
    alone = plan_of(model, None).budget.ranks[0]
    assert [rank.draft > 0 for rank in two] == [True, False, False, False]
    assert two[0].block - alone.block == 2 * (one[0].block - alone.block)


def test_partitioned_weights_leave_the_draft_model_as_it_is(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_hidden_layers=8)
    plain, drafted = (plan_of(model, draft, dp=2, weights="partition") for draft in (None, model))
    resident = plan_of(model, model, dp=2).budget.ranks[0]
    first, alone = drafted.budget.ranks[0], plain.budget.ranks[0]
    assert (first.draft, first.block) == (resident.draft, resident.block)
    assert first.weights == alone.weights < resident.weights


def test_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", vocab_size=320)
    with pytest.raises(
        ValueError, match=r"--draft-model .*other: its vocabulary is not that of model, from token 304 on"
    ):
        plan_of(model, other)


@pytest.mark.parametrize(("tp", "dtype"), [(2, "float32"), (1, "bfloat16")])
def test_a_draft_prepared_for_something_else_is_refused(tp: int, dtype: str, model: Path, tmp_path: Path) -> None:
    make_prepared(open_checkpoint(str(model)), tmp_path / "draft", PrepareOptions(tp=tp, dtype=dtype))
    wanted = rf"prepared for --tp {tp} in {dtype}, and rank 0 drafts with a whole model in float32; make it with .*--tp 1 --dtype float32"
    with pytest.raises(ValueError, match=wanted):
        plan_of(model, tmp_path / "draft", dtype="float32")


def test_a_draft_prepared_for_one_rank_is_planned(model: Path, tmp_path: Path) -> None:
    make_prepared(open_checkpoint(str(model)), tmp_path / "draft", PrepareOptions(dtype="float32", quantization="int8"))
    prepared = plan_of(model, tmp_path / "draft", dtype="float32").budget.ranks[0].draft
    assert 0 < prepared < plan_of(model, model, dtype="float32").budget.ranks[0].draft


def test_a_draft_model_whose_matrices_cannot_be_packed_is_named(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_gguf(tmp_path / "draft.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"draft\.gguf: --quantization int4: the file holds .* in Q8_0"):
        plan_of(model, draft, quantization="int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"speculation": "draft"},
            "--draft-model must be a small model's name with --speculation draft, and left out without it, got None",
        ),
        (
            {"draft_model": "x"},
            "--draft-model must be a small model's name with --speculation draft, and left out without it, got 'x'",
        ),
        (
            {"speculation": "draft", "draft_model": "x", "kv_offload": True},
            "--speculation must be other than draft with --kv-offload: a draft model has its keys and values",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(options)


def test_the_model_that_is_fetched_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def fetch(name: str, seed: int, progress: Callable[[float], None]) -> Checkpoint:
        progress(0.5)
        return open_checkpoint(str(model), seed)

    class Heard(Progress):
        def stage(self, name: str, fraction: float, rank: int = 0) -> None:
            shown.append(name)

    monkeypatch.setattr(run_plan, "open_checkpoint", fetch)
    flags = {"model": "large", "draft_model": "small", "speculation": "draft", "device": "cpu"}
    prepare(make_config({**flags, "kv_cache_memory": 1 << 20}), Heard(1))
    assert shown == ["downloading large", "downloading small"]


def test_the_first_stage_of_a_pipeline_has_the_draft_model(model: Path) -> None:
    first, second = plan_of(model, model, layout="pipeline").budget.ranks
    assert second.draft == 0 < first.draft


def test_other_hosts_open_no_draft_model(model: Path) -> None:
    options = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1"}
    assert not plan_of(model, model / "not-here", **options).plan.draft


def test_a_packed_draft_model_rounds_activations_only_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = make_tiny_gguf(tmp_path / "m.gguf", "Q4_1")
    for compiled, used in ((True, "int8"), (False, "float")):
        monkeypatch.setattr(setting, "available", lambda compiled=compiled: compiled)
        assert f"activations in {used})" in plan_of(packed, packed).summary()
        assert choose_activations("fastest", "cpu", packed=True) == used
    assert (
        choose_activations("fastest", "cuda", packed=True) == choose_activations("fastest", "cpu", packed={}) == "float"
    )
