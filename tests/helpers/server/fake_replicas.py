"""Replicas without weights: a ``FakeRunner`` for each, whose tokens are gathered as by ``ChoiceGather``."""

from collections.abc import Sequence

import numpy as np
import torch
from helpers.model.ranked_sampling import choose_alone
from helpers.server.fake_runner import FakeRunner, OneRank
from torch import Tensor

from tightwire.model.step import StepPlan, ints
from tightwire.server.config.limits import Limits


class FakeReplicas(OneRank):
    """The engine's runner, and what it broadcasts to. Every plan is held against what the others say of it."""

    def __init__(self, limits: Limits, num_replicas: int, vocab_size: int) -> None:
        self.runners = [FakeRunner(limits, vocab_size, counts_steps=False) for _ in range(num_replicas)]
        self.steps: list[Sequence[StepPlan]] = []
        self._logits: list[Tensor | None] = []

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        assert len(plans) == len(self.runners) and any(plan.token_ids for plan in plans)
        assert {plan.index for plan in plans} == {len(self.steps) + 1}
        assert len({plan.gather_sizes for plan in plans}) == 1
        self.steps.append(plans)

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        plans = self.steps[-1]
        assert plan is plans[0]
        self._logits = [
            runner.execute(own) if own.token_ids else None for runner, own in zip(self.runners, plans, strict=True)
        ]
        return self._logits[0]

    def choose(self, plans: Sequence[StepPlan], logits_RV: Tensor | None, banned: Sequence[bytes]) -> Tensor:
        results = [
            torch.empty(0, dtype=torch.int64) if logits is None else choose_alone(logits, plan.sampling, own)
            for logits, plan, own in zip(self._logits, plans, banned, strict=True)
        ]
        brought = list(map(len, results))
        assert ints(plans[0].gather_sizes).tolist() == (brought if any(brought[1:]) else [])
        return torch.cat(results)

    def num_rows(self, replica: int) -> list[int]:
        """Tokens that a replica computed in each step."""
        return [int(np.sum(ints(plans[replica].query_lens))) for plans in self.steps]
