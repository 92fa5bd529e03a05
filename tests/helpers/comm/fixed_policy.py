"""Policies and routes as no server makes them: one algorithm for everything, and algorithms that nobody has checked."""

from collections.abc import Mapping

from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import Policy, one_for_all


def fixed_policy(name: str) -> Policy:
    """One algorithm for every message, whatever it costs and however exact it is."""
    return one_for_all(name)


def make_routes(policy: Policy, group: Group) -> Routes:
    """``policy`` over ``group``, without the self-test."""
    return make_arms({"fixed": policy}, group)


def make_arms(policies: Mapping[str, Policy], group: Group) -> Routes:
    """Several policies over ``group``, by name, without the self-test."""
    return Routes(list(policies.items()), make_candidates(policies.values(), group))
