"""One rank's AllReduces: made as the policy says, checked, and reported. What summed wrongly is not used."""

import logging
from dataclasses import dataclass

import torch

from tightwire.comm.group import Group
from tightwire.comm.policy import Policy
from tightwire.comm.routes import Routes, make_candidates
from tightwire.comm.self_test import Verdict, self_test
from tightwire.server.config import EngineOptions
from tightwire.server.messages import CommChoice, CommSetup, SelfTestVerdict
from tightwire.server.rank_setup import RunPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckedComm:
    """``routes``: what the model sums with, None for a single rank; ``setup``: the same in words."""

    routes: Routes | None
    setup: CommSetup


def check_comm(group: Group, plan: RunPlan, row_elems: int, options: EngineOptions) -> CheckedComm:
    """Make every AllReduce of the plan's policy, test each in the sizes to come, and quarantine the wrong ones.

    Collective. All ranks come to the same result.

    Raises:
        QuarantinedError: an algorithm that was asked for by name, or all that ``auto`` could use, sum wrongly.
    """
    setup = CommSetup(transport=plan.transport, num_nodes=plan.num_nodes)
    if group.world_size == 1:
        return CheckedComm(None, setup)
    candidates = make_candidates(plan.policy, group)
    dtype: torch.dtype = getattr(torch, plan.dtype)
    group.ledger.phase = "self-test"
    verdicts = self_test(group, candidates, row_elems=row_elems, max_rows=options.max_num_batched_tokens, dtype=dtype)
    wrong = {verdict.algorithm: verdict.detail for verdict in verdicts if not verdict.ok}
    if group.rank == 0:
        for name, detail in wrong.items():
            _log.error("quarantined %s, which failed the self-test: %s", name, detail)
    policy = plan.policy.without(wrong)
    return CheckedComm(Routes(policy, candidates), _describe(setup, policy, verdicts))


def _describe(setup: CommSetup, policy: Policy, verdicts: list[Verdict]) -> CommSetup:
    return CommSetup(
        transport=setup.transport,
        num_nodes=setup.num_nodes,
        choices=[
            CommChoice(
                site=rule.site,
                phase=rule.phase,
                up_to_bytes=choice.up_to_bytes,
                algorithm=choice.algorithms[0],
                reason=choice.reason,
            )
            for rule in policy.rules
            for choice in rule.choices
        ],
        self_test=[SelfTestVerdict(algorithm=v.algorithm, ok=v.ok, detail=v.detail) for v in verdicts],
    )
