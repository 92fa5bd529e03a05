"""Ranks as threads: the hidden states of the model that serves, at world sizes that split it unevenly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from tightwire.bench.quality.measure import make_pool, score
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import bytes_per_token, exact_arm, make_arm, one_algorithm_arm
from tightwire.comm.policy.rules import DROP
from tightwire.model.open import Checkpoint, formats_of, open_checkpoint
from tightwire.training.data.documents import english_text

PROMPTS = torch.arange(2 * 40).view(2, 40) * 3 % 200
LOSSY = "flash:int4-g32,int4-g32"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("model"), dtype="bfloat16")))


@pytest.fixture
def ranks(checkpoint: Checkpoint) -> Iterator[ThreadRanks]:
    with open_ranks(checkpoint, 3, torch.bfloat16) as ranks:
        ranks.set_arms([exact_arm(), make_arm(LOSSY, checkpoint.config), make_arm("one-shot", checkpoint.config)])
        yield ranks


def open_ranks(checkpoint: Checkpoint, world_size: int, dtype: torch.dtype) -> ThreadRanks:
    return ThreadRanks(checkpoint, world_size, dtype=dtype, num_sequences=2, max_tokens=64)


def test_every_world_size_computes_the_same_model(checkpoint: Checkpoint) -> None:
    logits = {}
    for world_size in (1, 2, 4):
        with open_ranks(checkpoint, world_size, torch.float32) as ranks:
            ranks.set_arms([exact_arm()])
            logits[world_size] = ranks.prefill(PROMPTS, 0) @ ranks.head_VD.T
    for world_size in (2, 4):
        assert logits[world_size] == pytest.approx(logits[1], abs=1e-4)
    assert logits[1].std() > 0.1


def test_quantized_sums_differ_more_than_lossless_ones_in_bfloat16(ranks: ThreadRanks) -> None:
    exact, lossy, lossless = (ranks.prefill(PROMPTS, arm) for arm in range(3))
    assert 0 < (lossless - exact).abs().mean() < 0.2 * (lossy - exact).abs().mean()
    assert torch.equal(lossy, ranks.prefill(PROMPTS, 1)), "the same pass gave other bits"


def test_generated_rows_are_those_of_a_prompt_and_alone_are_quantized(checkpoint: Checkpoint) -> None:
    with open_ranks(checkpoint, 3, torch.float32) as ranks:
        ranks.set_arms([exact_arm(), make_arm(LOSSY, checkpoint.config, "decode")])
        prompt, generated, lossy = ranks.prefill(PROMPTS, 0), ranks.forward(PROMPTS, 0, 7), ranks.forward(PROMPTS, 1, 7)

    assert generated == pytest.approx(prompt, abs=1e-4)
    assert torch.equal(lossy[:, :33], generated[:, :33])
    assert ((lossy - generated)[:, 33:].abs().amax(2) > 1e-3).all()


def test_in_float32_messages_lossless_sums_are_exact(checkpoint: Checkpoint) -> None:
    with open_ranks(checkpoint, 3, torch.float32) as ranks:
        ranks.set_arms([exact_arm(), make_arm("one-shot", checkpoint.config)])
        assert torch.equal(ranks.prefill(PROMPTS, 0), ranks.prefill(PROMPTS, 1))


def test_splitting_a_model_costs_no_accuracy() -> None:
    """KL from float32 with the default formats on real weights: at TP 2 at most 1.1 times that at TP 1."""
    checkpoint = open_checkpoint("smollm2-135m")
    ids = checkpoint.tokenizer().encode(english_text()[20_000:60_000])
    prompts, next_ids = torch.tensor(ids[:300]).view(3, 100), torch.tensor(ids[1:301])
    formats = formats_of(checkpoint, "auto")
    hidden = {}
    for name, world_size, dtype in (("", 1, torch.float32), ("1", 1, torch.bfloat16), ("2", 2, torch.bfloat16)):
        sizes = {"num_sequences": len(prompts), "max_tokens": prompts.shape[1]}
        with ThreadRanks(checkpoint, world_size, dtype=dtype, formats=formats if name else None, **sizes) as ranks:
            ranks.set_arms([exact_arm()])
            hidden[name], head_VD = ranks.prefill(prompts, 0).flatten(0, 1), ranks.head_VD
    exact_TD = hidden.pop("")
    with make_pool(2) as pool:
        scores = score(pool, head_VD, exact_TD, hidden, next_ids)
    assert 0 < scores["2"].kl_T.mean() <= 1.1 * scores["1"].kl_T.mean() < 5e-4


def test_a_rank_that_fails_frees_the_others(ranks: ThreadRanks) -> None:
    with pytest.raises(IndexError):
        ranks.prefill(PROMPTS, 9)


def test_bytes_are_those_of_the_formula(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    rows, places = 96, 2 * config.num_layers
    elems = rows * config.hidden_size
    assert bytes_per_token(exact_arm(), config, 2, rows, 2) == places * elems * 2 / rows  # 2 (N-1)/N of 2 bytes
    # Both legs of 8 bits, and a 16-bit scale and zero for each group of 128.
    arm = make_arm("flash-int8", config)
    assert bytes_per_token(arm, config, 2, rows, 2) == places * elems * (1 + 4 / 128) / rows


def test_names_that_are_no_arm_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ranks are on one"):
        make_arm("hierarchical:int8", checkpoint.config)
    with pytest.raises(ValueError, match="unknown all-reduce 'fast'"):
        make_arm("fast", checkpoint.config)
    with pytest.raises(ValueError, match="nothing cannot be read"):
        make_arm(f"policy:{tmp_path}/nothing", checkpoint.config)


def test_after_dropped_sums_all_ranks_have_the_same_bits(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, states = tuple(range(checkpoint.config.num_layers)), []
    with open_ranks(checkpoint, 4, torch.bfloat16) as ranks:
        ranks.set_arms([exact_arm(), one_algorithm_arm("dropped", DROP, layers, "o_proj")])
        on_ranks = ranks._on_ranks
        monkeypatch.setattr(ranks, "_on_ranks", lambda call: states.append(on_ranks(call)) or states[-1])
        exact, dropped = (ranks.prefill(PROMPTS, arm) for arm in range(2))
    assert all(torch.equal(state, states[1][0]) for state in states[1])
    assert not torch.equal(exact, dropped)
