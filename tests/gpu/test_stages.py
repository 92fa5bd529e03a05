"""A pipeline's stages on a GPU: whole engines, ranks as threads, answer as one rank does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.server.local_engine import local_engine, run_to_end
from helpers.server.staged_requests import params
from msgspec.structs import replace
from tiny import make_tiny

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.stages import divide_layers
from tightwire.server.ipc.messages import AddRequest, Output

pytestmark = pytest.mark.gpu

_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "drawn": {"temperature": 1.0, "seed": 3},
    "echo": {"temperature": 0.0, "prompt_logprobs": 1},
}


def _answers(checkpoint: Checkpoint, num_stages: int, together: bool, **options: Any) -> dict[str, Any]:
    """Tokens and scores. ``together``: all requests at once, else one after the other."""
    stages = None if num_stages == 1 else replace(divide_layers(4, [1] * num_stages), pipeline=True)
    outputs = dict[str, list[Output]]()
    with local_engine(checkpoint, tp=num_stages, stages=stages, max_model_len=64, **options) as local:
        for name, changes in _REQUESTS.items():
            local.engine.add(AddRequest(name, [5, 9, 200, 17], params({"max_tokens": 4} | changes)))
            outputs |= {} if together else run_to_end(local.engine)
        outputs |= run_to_end(local.engine)
    return {
        name: [(each.token_ids, each.logprobs, each.prompt_logprobs, each.finish_reason) for each in own]
        for name, own in outputs.items()
    }


@pytest.mark.parametrize(("dtype", "num_stages", "graphs_up_to"), [(torch.float32, 3, 0), (torch.bfloat16, 2, 2)])
def test_stages_answer_as_one_rank(
    dtype: torch.dtype, num_stages: int, graphs_up_to: int, device: torch.device, tmp_path: Path
) -> None:
    """To the bit, in steps of the same rows: hidden states pass in the residual's own dtype, also into and out of graphs."""
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, num_hidden_layers=4)))
    options: dict[str, Any] = {"device": device, "dtype": dtype, "graphs_up_to": graphs_up_to}
    alone = _answers(checkpoint, 1, False, **options)
    assert _answers(checkpoint, num_stages, False, **options) == alone
    several = _answers(checkpoint, num_stages, True, **options, stage_codec="int8-g64")
    assert {name: len(own) for name, own in several.items()} == {name: len(own) for name, own in alone.items()}
