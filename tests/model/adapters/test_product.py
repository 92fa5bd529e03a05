"""Adapters in slots give the answers of models they are merged into, split or not, alone and mixed in one step."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import run_in_process
from helpers.comm.fixed_policy import fixed_policy, make_arms
from helpers.model.family_models import make_family_folder
from helpers.model.lora import ALL_TARGETS, make_adapter, merge_adapter
from helpers.model.whole_logits import whole_logits
from tiny import VARIANTS, make_tiny
from torch import Tensor

from tightwire.comm.all_reduce.names import plain_names
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.model.adapters.peft import open_adapter
from tightwire.model.adapters.product import AdapterRoom, adapter_bytes
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.checkpoint.tensors import stored_tensors
from tightwire.model.families import family_named
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import make_plan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import choose_formats

_BLOCK_SIZE, _MAX_BLOCKS, _VOCAB = 16, 8, 304


def _runner(
    model: Path,
    adapters: Sequence[Path] = (),
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
    quantization: str = "auto",
    weight_plan: WeightPlan = EVERYTHING_RESIDENT,
) -> ModelRunner:
    """Adapter number i is in slot i, and there is one slot more."""
    checkpoint = open_checkpoint(str(model))
    group = group or in_process_groups(1)[0]
    several = group.world_size > 1
    runner = build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, group.world_size),
        RankGroups(group, routes=make_arms({"own": fixed_policy("one-shot")}, group) if several else None),
        RunnerOptions(
            dtype=dtype,
            max_model_len=_BLOCK_SIZE * _MAX_BLOCKS,
            num_blocks=8 * _MAX_BLOCKS,
            block_size=_BLOCK_SIZE,
            formats=choose_formats(checkpoint.reader(), checkpoint.config, quantization),
            weight_plan=weight_plan,
            adapters=AdapterRoom(len(adapters) + 1, 8) if adapters else None,
        ),
    )
    for slot, folder in enumerate(adapters):
        assert runner.adapters is not None
        runner.adapters.load(slot, open_adapter(folder, checkpoint.config))
    return runner


def _execute(runner: ModelRunner, slots: Sequence[int], num_new: int, context: int, first: int = 0) -> Tensor | None:
    """All logits of a step: ``num_new`` tokens of each sequence up to ``context``. ``first``: the first one's number."""
    numbers = range(first, first + len(slots))
    tokens = [torch.arange(context - num_new, context).mul(7).add(31 * number) % _VOCAB for number in numbers]
    return whole_logits(
        runner,
        make_plan(
            token_ids=torch.cat(tokens),
            query_lens=[num_new] * len(slots),
            context_lens=[context] * len(slots),
            block_tables=[range(number * _MAX_BLOCKS, (number + 1) * _MAX_BLOCKS) for number in numbers],
            num_decode_rows=num_new * len(slots) if context > num_new else 0,
            logit_rows=range(num_new * len(slots)),
            adapters=slots if max(slots) >= 0 else None,
        ),
    )


def _prompt_and_step(runner: ModelRunner, slots: Sequence[int], first: int = 0) -> list[Tensor]:
    """Logits (sequences, tokens, V) of prompts of 20 tokens, and of one more token each."""
    prompt, step = _execute(runner, slots, 20, 20, first), _execute(runner, slots, 1, 21, first)
    assert prompt is not None and step is not None
    return [prompt.view(len(slots), 20, -1), step.view(len(slots), 1, -1)]


def _folders(tmp_path: Path, variant: str = "plain") -> tuple[Path, list[Path]]:
    """A model and adapters of unlike ranks, targets and scales."""
    model = make_tiny(tmp_path / "model", **VARIANTS[variant])
    config = open_checkpoint(str(model)).config
    return model, [
        make_adapter(tmp_path / "every", config, rank=4, seed=1),
        make_adapter(tmp_path / "attention", config, rank=8, targets=["q_proj", "v_proj"], seed=2, use_rslora=True),
        make_adapter(tmp_path / "uneven", config, rank=2, alpha=3, targets=["o_proj", "up_proj", "down_proj"], seed=3),
    ]


@pytest.mark.parametrize("variant", ["plain", "odd-heads", "mlp-bias", "head-dim"])
def test_an_adapter_answers_as_the_merged_model(variant: str, tmp_path: Path) -> None:
    model, adapters = _folders(tmp_path, variant)
    base, adapted = _prompt_and_step(_runner(model), [-1]), _runner(model, adapters)
    for slot, folder in enumerate(adapters):
        merged = _runner(merge_adapter(model, folder, tmp_path / f"merged-{slot}"))
        for got, want, plain in zip(
            _prompt_and_step(adapted, [slot]), _prompt_and_step(merged, [-1]), base, strict=True
        ):
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
            assert (got - plain).abs().max() > 0.1


@pytest.mark.parametrize("family", ["Phi-3", "Granite 4", "Gemma 3", "OLMo 2"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_adapter_of_another_family(family: str, num_ranks: int, tmp_path: Path) -> None:
    """Of matrices that its files keep stacked, and beside norms of results."""
    model = make_family_folder(family_named(family), tmp_path / "model")
    config = open_checkpoint(str(model)).config
    targets = (*ALL_TARGETS, "qkv_proj", "gate_up_proj", "input_linear", "output_linear")
    targets = [name for name in targets if any(f".{name}." in tensor for tensor in stored_tensors(config))]
    adapter = make_adapter(tmp_path / "adapter", config, targets=targets)
    merged = merge_adapter(model, adapter, tmp_path / "merged")
    got = run_in_process(num_ranks, _answers, model, adapter)[0]
    for adapted, want, plain in zip(got, _answers(None, merged), _answers(None, model), strict=True):
        assert torch.allclose(adapted, want, rtol=1e-4, atol=1e-4)
        assert (adapted - plain).abs().max() > 0.1


def _answers(group: Group | None, model: Path, adapter: Path | None = None) -> list[Tensor]:
    runner = _runner(model, [adapter] if adapter else (), group=group)
    slots = [0 if adapter else -1]
    steps = [_execute(runner, slots, 20, 20), _execute(runner, slots, 1, 21)]
    return [step for step in steps if step is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mixed_step_gives_each_row_the_bits_it_has_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows of all adapters, of none, and of an empty slot; decode rows run in the layer program."""
    model, adapters = _folders(tmp_path)
    runner, slots = _runner(model, adapters, dtype), [2, 0, -1, 1, 1, 0, 3]
    together = _prompt_and_step(runner, slots)
    plain = _prompt_and_step(_runner(model, (), dtype), [-1] * len(slots))
    for number, slot in enumerate(slots):
        alone = _prompt_and_step(runner, [slot], first=number)
        for mixed, own, without in zip(together, alone, plain, strict=True):
            assert torch.equal(mixed[number], own[0])
            assert torch.equal(own[0], without[number]) == (slot in (-1, 3))


def test_a_slot_can_be_loaded_again(tmp_path: Path) -> None:
    model, adapters = _folders(tmp_path)
    config = open_checkpoint(str(model)).config
    runner, other = _runner(model, adapters), _runner(model, adapters[::-1])
    assert runner.adapters is not None
    first = _prompt_and_step(runner, [0])
    runner.adapters.load(0, open_adapter(adapters[2], config))
    assert all(map(torch.equal, _prompt_and_step(runner, [0]), _prompt_and_step(other, [0])))
    runner.adapters.load(0, open_adapter(adapters[0], config))
    assert all(map(torch.equal, _prompt_and_step(runner, [0]), first))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_and_streamed_base_weights(quantization: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", num_hidden_layers=4, head_dim=32)
    adapter = make_adapter(tmp_path / "adapter", open_checkpoint(str(model)).config)
    streamed = WeightPlan(source="stream", origin="host", streamed=(1, 2, 3))
    answers = []
    for plan in (EVERYTHING_RESIDENT, streamed):
        runner = _runner(model, [adapter], torch.bfloat16, quantization=quantization, weight_plan=plan)
        answers.append(_prompt_and_step(runner, [0, -1]))
        runner.close()
    assert all(map(torch.equal, *answers))
    assert not torch.equal(answers[0][0][0], answers[0][0][1])


def _split(group: Group, model: Path, adapters: Sequence[Path]) -> tuple[list[Tensor] | None, int]:
    runner, slots = _runner(model, adapters, group=group), [0, 1, -1, 2]
    prompt, step = _execute(runner, slots, 20, 20), _execute(runner, slots, 1, 21)
    num_bytes = sum(count.bytes_sent for count in group.ledger.counters.counts())
    return (None if prompt is None or step is None else [prompt, step]), num_bytes


def _split_without(group: Group, model: Path) -> int:
    runner = _runner(model, group=group)
    for num_new, context in ((20, 20), (1, 21)):
        _execute(runner, [-1] * 4, num_new, context)
    return sum(count.bytes_sent for count in group.ledger.counters.counts())


@pytest.fixture
def names_are_known() -> None:
    """Python 3.11 cannot parse source text in several threads at once, as each rank would to find an algorithm."""
    plain_names()


@pytest.mark.usefixtures("names_are_known")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_split_changes_no_token_and_sends_no_byte_more(tp: int, tmp_path: Path) -> None:
    model, adapters = _folders(tmp_path, "odd-heads")
    (whole, _), *_ = run_in_process(1, _split, model, adapters)
    split = run_in_process(tp, _split, model, adapters)
    assert whole is not None and split[0][0] is not None
    for got, want in zip(split[0][0], whole, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    assert [num_bytes for _, num_bytes in split] == run_in_process(tp, _split_without, model)


@pytest.mark.usefixtures("names_are_known")
@pytest.mark.parametrize("tp", [1, 2])
def test_slot_bytes(tp: int, tmp_path: Path) -> None:
    model, adapters = _folders(tmp_path)
    config = open_checkpoint(str(model)).config
    for rank, shard in enumerate(make_layout(config, tp).shards):
        (held,) = [r for r in run_in_process(tp, _held_bytes, model, adapters) if r[0] == rank]
        assert adapter_bytes(config, shard, AdapterRoom(len(adapters) + 1, 8), 4) == held[1]


def _held_bytes(group: Group, model: Path, adapters: Sequence[Path]) -> tuple[int, int]:
    runner = _runner(model, adapters, group=group)
    assert runner.adapters is not None
    return group.rank, sum(site.a_NX.nbytes + site.b_NX.nbytes for site in runner.adapters.sites.values())
