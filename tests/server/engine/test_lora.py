"""Adapters in the engine: mixed batches answer as each alone, in every mode; slots, versions, and unloading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.lora import make_adapter, merge_adapter
from helpers.server.local_engine import continue_prompts, local_engine, run_to_end
from tiny import VARIANTS, make_tiny

from tightwire.model.adapters.peft import open_adapter
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.lora import AdapterTable, SlotsFullError
from tightwire.server.ipc.messages import AddRequest

_PROMPTS = [list(range(40, 80)), [5], [200, 3, 17] * 11, list(range(40, 80)), [72, 101, 108], list(range(40, 80))]
_ADAPTERS = [1, 2, 0, 0, 2, 2]


def _make(tmp_path: Path) -> tuple[Path, list[Path]]:
    model = make_tiny(tmp_path / "model", **VARIANTS["odd-heads"])
    config = open_checkpoint(str(model)).config
    first = make_adapter(tmp_path / "first", config, seed=1)
    return model, [first, make_adapter(tmp_path / "second", config, rank=7, targets=["q_proj", "v_proj"], seed=2)]


@pytest.fixture(scope="module")
def of_merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[list[int]]]:
    """A model, its adapters, and the answers of models into which they are merged."""
    folder = tmp_path_factory.mktemp("merged")
    model, adapters = _make(folder)
    merged = [model, *(merge_adapter(model, a, folder / f"m{i}") for i, a in enumerate(adapters))]
    wanted = []
    for prompt, adapter in zip(_PROMPTS, _ADAPTERS, strict=True):
        with local_engine(open_checkpoint(str(merged[adapter])), max_model_len=256) as alone:
            wanted += continue_prompts(alone.engine, [prompt], max_tokens=16)
    return model, adapters, wanted


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"tp": 2},
        {"tp": 3, "max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"dp": 2},
        {"prefix_cache": "all", "drafter": Drafter(max_tokens=5, longest=4, shortest=2)},
        {"block_size": 4, "num_blocks": 26, "max_model_len": 64, "plan_ahead": True},
        {"tp": 2, "overlap": True, "max_num_batched_tokens": 128},
        {"buffer_blocks": 16},
    ],
    ids=str,
)
def test_a_mixed_batch_answers_as_the_merged_models(
    mode: dict[str, Any], of_merged: tuple[Path, list[Path], list[list[int]]]
) -> None:
    """Split, in chunks, with replicas, drafts, preemption, overlap, and an offloaded cache."""
    model, adapters, wanted = of_merged
    with local_engine(open_checkpoint(str(model)), adapters=adapters, **{"max_model_len": 256, **mode}) as local:
        for _ in range(2):  # the second time prompts are in the prefix cache
            assert continue_prompts(local.engine, _PROMPTS, _ADAPTERS, max_tokens=16) == wanted
        assert (local.engine.stats().counters.num_preemptions > 0) == ("num_blocks" in mode)


def test_a_prefix_is_shared_only_within_one_version_of_an_adapter(tmp_path: Path) -> None:
    model, adapters = _make(tmp_path)
    checkpoint = open_checkpoint(str(model))
    with local_engine(checkpoint, adapters=adapters, dtype=torch.bfloat16) as local:

        def answer(adapter: int) -> tuple[list[int], int]:
            before = local.engine.stats().counters.num_prefix_hit_tokens
            (tokens,) = continue_prompts(local.engine, [_PROMPTS[0]], [adapter], max_tokens=8)
            return tokens, local.engine.stats().counters.num_prefix_hit_tokens - before

        first = answer(1)
        assert first[1] == 0 and answer(1) == (first[0], 32)
        assert answer(2)[1] == answer(0)[1] == 0
        # The same name loaded again is another id, here with other weights, in the slot of the first one.
        local.engine.adapters.unload(1)
        assert local.engine.adapters.assign(3) == 0
        for runner in local.runners:
            assert runner.adapters is not None
            runner.adapters.load(0, open_adapter(adapters[1], checkpoint.config))
        again = answer(3)
        assert again[1] == 0 and again[0] == answer(2)[0] != first[0]


def test_requests_of_an_unloaded_adapter_finish_and_new_ones_are_refused(tmp_path: Path) -> None:
    model, adapters = _make(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with local_engine(open_checkpoint(str(model)), adapters=adapters) as local:
        (wanted,) = continue_prompts(local.engine, [[5]], [1], max_tokens=8)
        local.engine.add(AddRequest(id="runs", prompt_token_ids=[5], params=params, adapter=1))
        local.engine.step()
        local.engine.adapters.unload(1)
        assert local.engine.adapters.assign(9) == 2  # the free slot: the first one is still in use
        with pytest.raises(
            SlotsFullError, match="all 3 adapter slots are in use; 1 of them still answer requests: unload"
        ):
            local.engine.adapters.assign(10)
        local.engine.add(AddRequest(id="late", prompt_token_ids=[5], params=params, adapter=1))
        outputs = run_to_end(local.engine)
        assert [output.finish_reason for output in outputs["late"]] == ["refused"]
        assert "the adapter was unloaded" in (outputs["late"][0].message or "")
        assert wanted[-7:] == [token for output in outputs["runs"] for token in output.token_ids][-7:]
        assert local.engine.adapters.assign(10) == 0


def test_slots_are_freed_after_the_last_sequence() -> None:
    table = AdapterTable(1, {1: 0})
    assert table.begin(1) == table.begin(1) == 0 and table.begin(2) is None
    table.unload(1)
    table.unload(7)  # unknown
    assert table.begin(1) is None
    table.end(1)
    with pytest.raises(SlotsFullError):
        table.assign(2)
    table.end(1)
    assert table.assign(2) == 0 and table.begin(2) == 0
    with pytest.raises(SlotsFullError, match="are in use: unload an adapter, or start the server with a larger"):
        table.assign(3)
