"""AllReduces that are wrong, each in one way, for tests of whatever is to notice. Importable by rank processes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce


class _TooLarge(TwoShotAllReduce):
    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        return super().__call__(x, phase, site) * 1.25


class _UnlikeBits(TwoShotAllReduce):
    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        sum_N = super().__call__(x, phase, site)
        sum_N[0] = torch.nextafter(sum_N[0], sum_N.new_tensor(self.rank * 1e3))
        return sum_N


class _Wandering(TwoShotAllReduce):
    """Other bits in every call, and the same ones on all ranks; its bound would allow them."""

    _calls = 0

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        sum_N = super().__call__(x, phase, site)
        self._calls += 1
        sum_N[self._calls % sum_N.numel()] = 0.0
        return sum_N

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return super().max_error(inputs) + 100.0


class _Miscounting(TwoShotAllReduce):
    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return super().wire_bytes(num_elems, elem_bytes) + 1


class _Raising(TwoShotAllReduce):
    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        raise ZeroDivisionError("on purpose")


# Wrong algorithms by the name they pass for; every other name is what it says.
_FAULTY = {"ring": _TooLarge, "two-shot": _UnlikeBits, "one-shot": _Wandering, "native": _Miscounting}


def make_faulty(name: str, group: Group) -> AllReduce:
    return _FAULTY[name](group) if name in _FAULTY else make_all_reduce(name, group)


def make_raising(name: str, group: Group) -> AllReduce:
    """Raises on rank 1, whatever the name."""
    return _Raising(group) if group.rank == 1 else make_all_reduce(name, group)
