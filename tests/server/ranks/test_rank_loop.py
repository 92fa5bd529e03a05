"""The first requests of a rank reach the kernels that later ones need."""

from typing import Any

import pytest
from helpers.server.fake_runner import FakeRunner
from msgspec.structs import replace
from torch import Tensor

from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step import StepPlan, ints
from tightwire.server.config.limits import Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import RequestRules
from tightwire.server.ranks.rank_loop import warm_up_rounds

VOCAB = 61


class Watched(FakeRunner):
    """Notes of each step its rows of prompts, its rows of generated tokens, and its most keys."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps: list[tuple[int, int, int]] = []

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        num_rows, num_decoded = len(ints(plan.token_ids)), plan.num_decode_rows
        if num_rows:
            self.steps.append((num_rows - num_decoded, num_decoded, int(ints(plan.context_lens).max())))
        return super().execute(plan, chosen_R)


def _steps(device: str, max_model_len: int = 512) -> list[tuple[int, int, int]]:
    limits = Limits(
        max_model_len=max_model_len, max_num_seqs=8, max_num_batched_tokens=512, num_blocks=200, block_size=16
    )
    rules = RequestRules(vocab_size=VOCAB, max_model_len=max_model_len, policies=("auto", "two-shot"))
    runner = Watched(limits, VOCAB)
    engine = Engine(runner=runner, sampler=Sampler(VOCAB), limits=limits, rules=rules)
    for number, requests in enumerate(warm_up_rounds(limits, rules, device)):
        for place, request in enumerate(requests):
            engine.add(replace(request, id=f"{number}-{place}"))
        assert all(output.finish_reason in (None, "length") for output in engine.step().outputs)
    while engine.has_work():
        assert all(output.finish_reason in (None, "length") for output in engine.step().outputs)
    return runner.steps


def test_on_cuda_a_step_has_prompts_decode_rows_and_many_keys() -> None:
    assert any(prompts and decoded and keys > 256 for prompts, decoded, keys in _steps("cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("max_model_len", [2, 3, 100])
def test_the_requests_fit_a_short_context(device: str, max_model_len: int) -> None:
    assert max(keys for *_, keys in _steps(device, max_model_len)) <= max_model_len


def test_a_cpu_starts_with_short_prompts_only() -> None:
    assert max(keys for *_, keys in _steps("cpu")) < 32
