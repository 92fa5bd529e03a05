"""Ranks as threads: the hidden states of the model that serves, at world sizes that split it unevenly."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import bytes_per_token, exact_arm, make_arm
from tightwire.model.open import Checkpoint, open_checkpoint

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


def test_what_is_quantized_differs_and_what_is_lossless_does_not(ranks: ThreadRanks) -> None:
    exact, lossy, lossless = (ranks.prefill(PROMPTS, arm) for arm in range(3))
    assert torch.equal(exact, lossless)
    assert not torch.equal(exact, lossy)
    assert torch.equal(lossy, ranks.prefill(PROMPTS, 1)), "the same pass gave other bits"


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
