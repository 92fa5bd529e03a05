"""Preempted sequences that share a prefix which another one is still computing answer as alone."""

import random
from typing import Any

import pytest
from helpers.server.local_engine import local_engine, run_to_end
from tiny import make_tiny

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.stages import StagePlan
from tightwire.server.ipc.messages import AddRequest

_DRAW = random.Random(5)
_SHARED, _OTHER = ([_DRAW.randrange(256) for _ in range(size)] for size in (32, 112))
_PARTS = {"most_rows": 16}  # a step is computed in parts, as with streamed weights: decode rows before a prompt's
_HYBRID = {"tp": 2, "stages": StagePlan(((0, 2), (2, 4)))}  # a prompt's rows arrive a step later than they entered


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(tmp_path_factory.mktemp("m"), num_hidden_layers=4)))


def _answers(checkpoint: Checkpoint, asked: dict[str, tuple[list[int], int]], **options: Any) -> dict[str, list[int]]:
    with local_engine(checkpoint, max_num_batched_tokens=256, max_num_seqs=8, **options) as local:
        for name, (prompt, num_tokens) in asked.items():
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            local.engine.add(AddRequest(name, prompt, params))
        found = run_to_end(local.engine)
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in found.items()}


def _as_alone(checkpoint: Checkpoint, asked: dict[str, tuple[list[int], int]], num_blocks: int, **options: Any) -> None:
    """The oldest takes nearly all blocks in the end, so that the others are preempted and come back together."""
    options |= {"max_model_len": 16 * num_blocks, "num_blocks": num_blocks}
    alone = {name: _answers(checkpoint, {name: given}, **options)[name] for name, given in asked.items()}
    assert _answers(checkpoint, asked, **options) == alone


@pytest.mark.parametrize("options", [_PARTS, _HYBRID], ids=("parts", "hybrid"))
def test_a_prompt_of_whole_blocks(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    asked = {"oldest": (_OTHER, 112), **dict.fromkeys("xyz", (_SHARED, 60))}
    _as_alone(checkpoint, asked, 14, **options)


def test_a_prompt_inside_another_one_with_its_answer(checkpoint: Checkpoint) -> None:
    prompt = _SHARED[:20]
    longer = prompt + _answers(checkpoint, {"x": (prompt, 40)}, max_model_len=128, num_blocks=64)["x"]
    asked = {"oldest": (_OTHER[:64], 160), "longer": (longer, 60), "x": (prompt, 100)}
    _as_alone(checkpoint, asked, 14, prefix_cache="all", **_PARTS)
