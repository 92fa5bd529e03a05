"""A model that drafts on a GPU: whole engines answer as without drafts, with graphs and steps planned ahead where none may draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.server.draft_engine import SIZES, drafting_engine
from helpers.server.local_engine import LocalEngine, local_engine, run_to_end
from helpers.server.staged_requests import params
from tiny import make_tiny

from tightwire.model.open import open_checkpoint
from tightwire.server.ipc.messages import AddRequest

pytestmark = pytest.mark.gpu


def _answers(local: LocalEngine) -> list[list[int]]:
    found = []
    for changes in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        local.engine.add(AddRequest("a", [5, 9, 200, 17], params({"max_tokens": 6} | changes)))
        (outputs,) = run_to_end(local.engine).values()
        found.append([token_id for output in outputs for token_id in output.token_ids])
    return found


def test_a_model_drafts_on_the_device(device: torch.device, tmp_path: Path) -> None:
    models = {"itself": open_checkpoint(str(make_tiny(tmp_path)))}
    options: dict[str, Any] = {"device": device, "graphs_up_to": 2, "plan_ahead": True}
    with local_engine(models["itself"], dtype=torch.float32, **(SIZES | options)) as local:
        wanted = _answers(local)
        assert local.engine.stats().counters.num_steps_ahead > 0
    with drafting_engine(models, "itself", text=False, **options) as (local, drafter, _):
        drafter.measure()
        drafter._head_s_H[:] = 0.0  # or a machine under load drafts among a part of the ids
        assert _answers(local) == wanted
        counters = local.engine.stats().counters
    assert counters.num_accepted_draft_tokens > 0 == counters.num_steps_ahead
