"""Turns policies into AllReduces; messages with the same choices share one object, so they may be sent together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.group.group import Group
from tightwire.comm.policy.choose import Chooser, PolicyRequest
from tightwire.comm.policy.cost import CostModel
from tightwire.comm.policy.rules import DROP, Choice, Policy
from tightwire.comm.protocols import AllReduce, KernelSums


def make_candidates(
    policies: Iterable[Policy], group: Group, make: Callable[[str, Group], AllReduce] = make_all_reduce
) -> dict[str, AllReduce]:
    """Make every algorithm that a policy may use, in the same order on all ranks; ValueError: no such algorithm."""
    names = dict.fromkeys(name for policy in policies for name in policy.algorithms if name != DROP)
    return {name: make(name, group) for name in names}


_AUTO_ROW_BYTES, _AUTO_ROWS = 1 << 10, 1 << 16


class Routes:
    """Looks up AllReduces for ``policies``, by name, among the ``candidates`` made for them. For one thread."""

    def __init__(self, policies: Sequence[tuple[str, Policy]], candidates: Mapping[str, AllReduce]) -> None:
        self._policies, self._candidates = tuple(policies), candidates
        self._made: dict[tuple[tuple[int | None, str], ...], AllReduce] = {}

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies; a policy's number is its place here."""
        return tuple(name for name, _ in self._policies)

    def drops(self, site: str, layer: int, phase: str, policy: int = 0) -> bool:
        """True if these messages are not summed: a policy file drops them."""
        return self._policies[policy][1].choices(site, layer, phase)[0].algorithms[0] == DROP

    def all_reduce(self, site: str, layer: int, phase: str, policy: int = 0) -> AllReduce:
        """Return the AllReduce for these messages, for the caller to keep; ValueError: there is no rule for them.

        They must not be dropped.
        """
        return self._by_size(self._policies[policy][1].choices(site, layer, phase))

    def _by_size(self, choices: tuple[Choice, ...]) -> AllReduce:
        key = tuple((choice.up_to_bytes, choice.algorithms[0]) for choice in choices)
        if key not in self._made:
            table = [(limit, self._candidates[name]) for limit, name in key]
            self._made[key] = table[0][1] if len(table) == 1 else SizedAllReduce(table)
        return self._made[key]


class SizedAllReduce:
    """Each message uses the algorithm of the first limit that it does not exceed. The ledger records that algorithm."""

    def __init__(self, table: Sequence[tuple[int | None, AllReduce]], name: str = "by size") -> None:
        """Take a ``table`` of (largest message in bytes, algorithm) with rising limits, the last one None; else ValueError."""
        limits = [limit for limit, _ in table if limit is not None]
        if not table or table[-1][0] is not None or len(limits) < len(table) - 1:
            raise ValueError("the last entry, and no other, is for messages of any size")
        if limits != sorted(set(limits)):
            raise ValueError(f"limits must rise, got {limits}")
        self.name, self.lossless = name, all(all_reduce.lossless for _, all_reduce in table)
        self._limited = [(limit, all_reduce) for limit, all_reduce in table if limit is not None]
        self._largest = table[-1][1]

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        return self.choose(x.nbytes)(x, phase, site, feedback)

    def choose(self, num_bytes: int) -> AllReduce:
        for limit, all_reduce in self._limited:
            if num_bytes <= limit:
                return all_reduce
        return self._largest

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return self.choose(num_elems * elem_bytes).wire_bytes(num_elems, elem_bytes)

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.choose(inputs[0].nbytes).max_error(inputs)


def auto_all_reduce(group: Group) -> AllReduce:
    """``auto`` without a model: what ``Chooser`` decides from the cost model's seeds, for 1 KiB to 64 MiB."""
    fused = {"cpu": "shared-memory", "cuda": "peer-memory"}[group.device.type]
    setting = Setting(
        transport="process-group" if group.transport.fused is None else fused,
        device=group.device.type,
        world_size=group.world_size,
        num_nodes=1,
        dtype="bfloat16",  # irrelevant for algorithms that encode nothing
    )
    request = PolicyRequest(row_elems=_AUTO_ROW_BYTES // setting.elem_bytes, max_rows=_AUTO_ROWS, max_decode_rows=1)
    choices = Chooser(request, CostModel(setting)).policy().choices("o_proj", 0, "prefill")
    return SizedAllReduce(
        [(choice.up_to_bytes, make_all_reduce(choice.algorithms[0], group)) for choice in choices], "auto"
    )


ENTRY = replace(NAMES["auto"], make=auto_all_reduce)


def kernel_sums(all_reduce: AllReduce, num_elems: int, elem_bytes: int) -> KernelSums | None:
    """Return the sums in a kernel that equal ``all_reduce`` at this size; all one-shots share one. Return None if there are none."""
    while isinstance(all_reduce, SizedAllReduce):
        all_reduce = all_reduce.choose(num_elems * elem_bytes)
    return all_reduce.in_kernel if isinstance(all_reduce, OneShotAllReduce) else None
