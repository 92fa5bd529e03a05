"""Policies turned into AllReduces: for each kind of message of the model, the object that sums it.

A model may be given several policies, its arms: each forward pass goes by one of them. Objects are shared: two kinds of
message with the same choices get the same object, so a caller can tell by identity whether two parts of a tensor may
travel together.
"""

from collections.abc import Iterable, Mapping, Sequence

from tightwire.comm.all_reduce.by_size import by_size
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.rules import Choice, Policy
from tightwire.comm.protocols import AllReduce


def make_candidates(policies: Iterable[Policy], group: Group) -> dict[str, AllReduce]:
    """Every algorithm that one of ``policies`` may use, by name; all ranks make the same ones in the same order.

    Raises:
        ValueError: no such algorithm.
    """
    names = dict.fromkeys(name for policy in policies for name in policy.algorithms)
    return {name: make_all_reduce(name, group) for name in names}


class Routes:
    """``arms``, policies by name, over the ``candidates`` made for them all. One thread, as the AllReduces themselves."""

    def __init__(self, arms: Sequence[tuple[str, Policy]], candidates: Mapping[str, AllReduce]) -> None:
        self._arms, self._candidates = tuple(arms), candidates
        self._made: dict[tuple[tuple[int | None, str], ...], AllReduce] = {}

    @property
    def arms(self) -> tuple[str, ...]:
        """Their names; an arm's number is its place here."""
        return tuple(name for name, _ in self._arms)

    def all_reduce(self, site: str, layer: int, phase: str, arm: int = 0) -> AllReduce:
        """What sums these messages when an arm is in force; ask once and keep it.

        Raises:
            ValueError: the policy has no rule for them.
        """
        return self._by_size(self._arms[arm][1].choices(site, layer, phase))

    def _by_size(self, choices: tuple[Choice, ...]) -> AllReduce:
        key = tuple((choice.up_to_bytes, choice.algorithms[0]) for choice in choices)
        if key not in self._made:
            self._made[key] = by_size([(limit, self._candidates[name]) for limit, name in key])
        return self._made[key]
