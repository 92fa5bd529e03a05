"""Turns policies into AllReduces: the object that sums each kind of message.

A model may have several policies; each forward pass uses one of them. Two kinds of message with the same choices share one
object, so a caller can tell by identity whether two parts of a tensor may be sent together.
"""

from collections.abc import Iterable, Mapping, Sequence

from tightwire.comm.all_reduce.by_size import by_size
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.policy.rules import Choice, Policy
from tightwire.comm.protocols import AllReduce


def make_candidates(policies: Iterable[Policy], group: Group) -> dict[str, AllReduce]:
    """Make every algorithm that a policy may use, by name; all ranks make the same ones in the same order.

    Raises:
        ValueError: no such algorithm.
    """
    names = dict.fromkeys(name for policy in policies for name in policy.algorithms)
    return {name: make_all_reduce(name, group) for name in names}


class Routes:
    """Looks up AllReduces: ``arms`` are policies by name, over the ``candidates`` made for them. For one thread."""

    def __init__(self, arms: Sequence[tuple[str, Policy]], candidates: Mapping[str, AllReduce]) -> None:
        self._arms, self._candidates = tuple(arms), candidates
        self._made: dict[tuple[tuple[int | None, str], ...], AllReduce] = {}

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the policies; a policy's number is its place here."""
        return tuple(name for name, _ in self._arms)

    def all_reduce(self, site: str, layer: int, phase: str, arm: int = 0) -> AllReduce:
        """Return the AllReduce for these messages under policy number ``arm``; the caller keeps it.

        Raises:
            ValueError: the policy has no rule for these messages.
        """
        return self._by_size(self._arms[arm][1].choices(site, layer, phase))

    def _by_size(self, choices: tuple[Choice, ...]) -> AllReduce:
        key = tuple((choice.up_to_bytes, choice.algorithms[0]) for choice in choices)
        if key not in self._made:
            self._made[key] = by_size([(limit, self._candidates[name]) for limit, name in key])
        return self._made[key]
