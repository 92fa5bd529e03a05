"""A policy turned into AllReduces: for each kind of message of the model, the object that sums it.

Objects are shared: two kinds of message with the same choices get the same object, so a caller can tell by identity
whether two parts of a tensor may travel together.
"""

from collections.abc import Mapping

from tightwire.comm.all_reduce.by_size import by_size
from tightwire.comm.group import Group
from tightwire.comm.policy.rules import Choice, Policy
from tightwire.comm.protocols import AllReduce
from tightwire.comm.registry import make_all_reduce


def make_candidates(policy: Policy, group: Group) -> dict[str, AllReduce]:
    """Every algorithm that ``policy`` may use, by name; all ranks make the same ones in the same order.

    Raises:
        ValueError: no such algorithm.
    """
    return {name: make_all_reduce(name, group) for name in policy.algorithms}


class Routes:
    """``policy`` over the ``candidates`` made for it. One thread, as the AllReduces themselves."""

    def __init__(self, policy: Policy, candidates: Mapping[str, AllReduce]) -> None:
        self._policy, self._candidates = policy, candidates
        self._made: dict[tuple[tuple[int | None, str], ...], AllReduce] = {}

    def all_reduce(self, site: str, layer: int, phase: str) -> AllReduce:
        """What sums these messages; ask once and keep it.

        Raises:
            ValueError: the policy has no rule for them.
        """
        return self._by_size(self._policy.choices(site, layer, phase))

    def _by_size(self, choices: tuple[Choice, ...]) -> AllReduce:
        key = tuple((choice.up_to_bytes, choice.algorithms[0]) for choice in choices)
        if key not in self._made:
            self._made[key] = by_size([(limit, self._candidates[name]) for limit, name in key])
        return self._made[key]
