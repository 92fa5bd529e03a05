"""Every AllReduce by name. A name is "module:attribute" and is imported when chosen."""

from importlib import import_module

from tightwire.comm.group import Group
from tightwire.comm.protocols import AllReduce

ALL_REDUCE = {
    "auto": "tightwire.comm.all_reduce.auto:AutoAllReduce",
    "native": "tightwire.comm.all_reduce.native:NativeAllReduce",
    "one-shot": "tightwire.comm.all_reduce.one_shot:OneShotAllReduce",
    "ring": "tightwire.comm.all_reduce.ring:RingAllReduce",
    "two-shot": "tightwire.comm.all_reduce.two_shot:TwoShotAllReduce",
}


def make_all_reduce(name: str, group: Group) -> AllReduce:
    """The algorithm ``name`` over ``group``; all ranks make the same one.

    Raises:
        ValueError: no such algorithm.
    """
    if name not in ALL_REDUCE:
        raise ValueError(f"unknown all-reduce {name!r}; choose one of {', '.join(sorted(ALL_REDUCE))}")
    module, attribute = ALL_REDUCE[name].split(":")
    return getattr(import_module(module), attribute)(group)
