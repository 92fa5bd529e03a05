"""Makes one rank's AllReduces from the policy, tests them, and quarantines those that sum wrongly."""

import logging
from collections.abc import Callable

import torch

from tightwire.comm.all_reduce.self_test import agree, self_test
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import Policy, QuarantinedError
from tightwire.server.ipc.messages import CommSetup
from tightwire.server.plan.comm_decision import policy_choices
from tightwire.server.plan.rank_setup import RunPlan

_log = logging.getLogger(__name__)


def check_comm(
    group: Group,
    plan: RunPlan,
    *,
    row_elems: int,
    max_rows: int,
    await_others: Callable[[], None] = lambda: None,
    world: Group | None = None,
) -> tuple[Routes | None, CommSetup]:
    """Make every AllReduce of the plan's policies, test each, and quarantine the wrong ones. Collective.

    Returns the model's AllReduces (None for a single rank) and their description.
    The test uses messages of one row and of ``max_rows``. ``world``: the ranks of all replicas, which must sum alike.
    ``await_others``: called after this rank has compiled its kernels, before the first collective with a deadline.
    QuarantinedError: the algorithm requested by name, or every candidate of ``auto``, sums wrongly.
    ValueError: peer memory was requested by name and is unavailable.
    """
    if group.world_size == 1:
        return None, CommSetup(transport=plan.transport, num_nodes=plan.num_nodes)
    transport, reason, requested = _resolve_transport(group, plan)
    candidates = make_candidates(list(requested.values()), group)
    await_others()
    dtype: torch.dtype = getattr(torch, plan.sum_dtype)
    verdicts = self_test(group, candidates, row_elems=row_elems, max_rows=max_rows, dtype=dtype)
    if world is not None:
        verdicts = agree(world, verdicts, group.world_size)
    wrong = {verdict.algorithm: verdict.detail for verdict in verdicts if not verdict.ok}
    if group.rank == 0:
        for name, detail in wrong.items():
            _log.error("quarantined %s, which failed the self-test: %s", name, detail)
    policies: dict[str, Policy] = {}
    for name, policy in requested.items():
        try:
            policies[name] = policy.without(wrong)
        except QuarantinedError as error:
            if name == plan.policy_names[0]:
                raise
            raise QuarantinedError(f"--allreduce-extra {name}: {error}") from None
    choices = {name: policy_choices(policy) for name, policy in policies.items()}
    setup = CommSetup(
        transport=transport,
        transport_reason=reason,
        num_nodes=plan.num_nodes,
        overlap=plan.overlap,
        choices=choices[plan.policy_names[0]],
        self_test=verdicts,
        extra={name: choices[name.removesuffix("/tensor")] for name in plan.policy_names[1:]},
    )
    return Routes(list(policies.items()), candidates), setup


def _resolve_transport(group: Group, plan: RunPlan) -> tuple[str, str, dict[str, Policy]]:
    """The transport in use, why it is not a faster one, and its policies by name, the server's own first."""
    if not group.no_peer_memory:
        return plan.transport, plan.transport_reason, {named.name: named.policy for named in plan.policies}
    policies: dict[str, Policy] = {}
    for named in plan.policies:
        if named.library_policy is None:
            raise ValueError(
                f"--transport peer-memory is unavailable: {group.no_peer_memory}; use --transport process-group, or auto"
            )
        policies[named.name] = named.library_policy
    return "process-group", f"no peer memory: {group.no_peer_memory}", policies
