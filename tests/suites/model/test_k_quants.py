"""Files of K-quants that mix formats as llama.cpp's do: the same bits from a prepared folder, streamed, partitioned, adapted."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_in_process
from helpers.model.lora import make_adapter
from helpers.model.partition_bodies import Work, World
from helpers.model.partition_checks import NUM_LAYERS, PROMPTS, check_bytes, check_logits, plan_for, run_threads
from helpers.model.rank_logits import PROMPT, rank_logits
from helpers.model.tiny_gguf import make_tiny_gguf
from helpers.server.local_engine import continue_prompts, local_engine
from torch import Tensor

from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import WeightPlan

# The types of most matrices, and of those that llama.cpp gives more bits.
_MIXES: dict[str, tuple[str, dict[str, str]]] = {
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}),
    "Q3_K_M": ("Q3_K", {"attn_v": "Q5_K", "ffn_down": "Q4_K", "output.": "Q6_K"}),
    "Q2_K": ("Q2_K", {"attn_v": "Q4_K", "ffn_down": "Q3_K", "output.": "Q6_K"}),
    "IQ4_XS": ("IQ4_XS", {"attn_v": "Q5_K", "token_embd": "Q8_0"}),
    "Q4_K_M of narrow rows": ("Q5_0", {"attn_v": "Q8_0", "ffn_down": "Q6_K"}),
}
# Each rank of two has another number of superblocks, of MLP columns and of attention outputs.
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 6,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
}
_TOKENS = list(range(3, PROMPT + 6))
_every_mix = pytest.mark.parametrize("mix", _MIXES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory):
    """The file of each mix, made once."""

    def make(mix: str) -> Path:
        kind, others = _MIXES[mix]
        return make_tiny_gguf(tmp_path_factory.mktemp("mix") / "m.gguf", kind, others=others, **_SIZES)

    return cache(make)


def _logits(location: Path, num_ranks: int, **options: Any) -> Tensor:
    ranks = partial(rank_logits, dtype=torch.bfloat16, **options)
    return run_in_process(num_ranks, ranks, str(location), _TOKENS)[0]


@_every_mix
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_prepared_and_streamed_weights_give_the_bits_of_the_file(
    mix: str, num_ranks: int, files, tmp_path: Path
) -> None:
    """Each mix also with int8 activations, and each place with weights from the host, on one of the numbers of ranks."""
    int8 = (list(_MIXES).index(mix) + num_ranks) % 2 == 0
    want = _logits(files(mix), num_ranks, int8=int8)
    prepare(open_checkpoint(str(files(mix))), tmp_path / "out", PrepareOptions(tp=num_ranks, dtype="bfloat16"))
    origins = ("host", "disk") if num_ranks == 1 else ("disk", "host")
    for location, origin in zip((files(mix), tmp_path / "out"), origins, strict=True):
        plan = WeightPlan(source="stream", origin=origin, streamed=(1, 2, 4, 5))
        got = _logits(location, num_ranks, int8=int8, weight_plan=plan)
        assert torch.equal(got, want), f"{location.name} {origin}"
    assert torch.equal(_logits(tmp_path / "out", num_ranks, int8=int8), want)


# Three replicas, below, have Q4_K_M.
@pytest.mark.parametrize("mix", [mix for mix in _MIXES if mix != "Q4_K_M"])
def test_partitioned_weights_give_the_bits_of_weights_of_ones_own(mix: str, files, tmp_path: Path) -> None:
    prepare(open_checkpoint(str(files(mix))), tmp_path / "out", PrepareOptions(tp=2, dtype="bfloat16"))
    _check_partition(World(2, 4, num_nodes=2), files(mix), tmp_path / "out")


def test_three_replicas_that_share_weights_have_the_bits_of_weights_of_ones_own(files, tmp_path: Path) -> None:
    prepare(open_checkpoint(str(files("Q4_K_M"))), tmp_path / "out", PrepareOptions(tp=1, dtype="bfloat16"))
    _check_partition(World(1, 3), files("Q4_K_M"), tmp_path / "out")


def _check_partition(world: World, file: Path, folder: Path) -> None:
    stored = Work(str(file), plan_for(world, num_streamed=4), PROMPTS[: world.dp], dtype="bfloat16")
    done = run_threads(world, stored)
    check_logits(world, stored, done)
    check_bytes(world, stored, done)
    prepared = Work(str(folder), stored.plan, stored.prompts, dtype="bfloat16")
    for got, want in zip(run_threads(world, prepared), done, strict=True):
        assert len(got.logits) == len(want.logits) and all(map(torch.equal, got.logits, want.logits))


# Adapters add to what a product gives, whatever the format of its weights.
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q4_K_M of narrow rows"])
def test_adapters_answer_alike_on_resident_and_streamed_weights(mix: str, files, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(files(mix)))
    adapter = make_adapter(tmp_path / "adapter", checkpoint.config)
    streamed = WeightPlan(source="stream", origin="host", streamed=(1, 2, 4, 5))
    prompts, answers = [[5], list(range(40, 90))], []
    for tp, plan in ((1, WeightPlan()), (1, streamed), (2, streamed)):
        with local_engine(checkpoint, tp=tp, weight_plan=plan, adapters=[adapter], max_model_len=128) as local:
            answers.append([continue_prompts(local.engine, prompts, [own] * 2, max_tokens=8) for own in (0, 1)])
    assert answers[1:] == answers[:1] * 2
    assert answers[0][0] != answers[0][1]
