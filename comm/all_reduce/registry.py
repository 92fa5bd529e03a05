"""Every AllReduce by name: fixed names, and patterns that take codecs. An algorithm is imported when it is made."""

from dataclasses import dataclass
from importlib import import_module

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce

# Names without options, as "module:attribute"; all are lossless.
ALL_REDUCE = {
    "auto": "tightwire.comm.policy.auto:AutoAllReduce",
    "native": "tightwire.comm.all_reduce.native:NativeAllReduce",
    "one-shot": "tightwire.comm.all_reduce.one_shot:OneShotAllReduce",
    "ring": "tightwire.comm.all_reduce.ring:RingAllReduce",
    "two-shot": "tightwire.comm.all_reduce.two_shot:TwoShotAllReduce",
}
_FLASH = "tightwire.comm.all_reduce.flash:FlashAllReduce"
_HIERARCHICAL = "tightwire.comm.all_reduce.hierarchical:HierarchicalAllReduce"

# Codecs of the two legs, reduce-scatter and all-gather, of the fixed flash names.
FLASH_PRESETS = {
    "flash-int8": ("int8", "int8"),
    "flash-int6": ("int4", "int8"),  # as published, 6.25 bits on average
    "flash-int6-uniform": ("int6", "int6"),  # the same bytes with a smaller error
    "flash-int5": ("int5", "int5"),
    "flash-int4": ("int4", "int4"),
}
PATTERNS = {
    "flash:RS,AG": "a codec for each leg, such as flash:int4,int8 or flash:int4-g64-had,int6",
    "hierarchical": "inside each node, then between nodes",
    "hierarchical:CODEC": "the same with the leg between nodes quantized, such as hierarchical:int8",
}


@dataclass(frozen=True, slots=True)
class AllReduceName:
    """A valid name, taken apart. ``codecs`` are what the algorithm's constructor takes after the group."""

    name: str
    target: str  # module:attribute
    codecs: tuple[Codec, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether nothing is quantized, whatever the group."""
        return all(codec.exact for codec in self.codecs)


def all_reduce_names() -> list[str]:
    """The names that stand for themselves, for tests, self-tests and benchmarks of all of them."""
    return [*sorted(ALL_REDUCE), *FLASH_PRESETS, "hierarchical"]


def describe_all_reduce_names() -> str:
    """What may be asked for, in one line."""
    return f"{', '.join([*sorted(ALL_REDUCE), *FLASH_PRESETS, *PATTERNS])} (with codecs such as int8, int4-g32, none)"


def parse_all_reduce(name: str) -> AllReduceName:
    """Take ``name`` apart, without a group.

    Raises:
        ValueError: no such algorithm, or one of its codecs does not exist; says what is possible.
    """
    if name in ALL_REDUCE:
        return AllReduceName(name, ALL_REDUCE[name])
    if name in FLASH_PRESETS:
        return AllReduceName(name, _FLASH, tuple(parse_codec(codec) for codec in FLASH_PRESETS[name]))
    family, colon, codecs = name.partition(":")
    if family == "flash" and colon:
        parts = codecs.split(",")
        if len(parts) != 2:
            raise ValueError(
                f"{name!r} needs two codecs, for the reduce-scatter and the all-gather leg, such as flash:int4,int8"
            )
        return AllReduceName(name, _FLASH, tuple(_codec_of(name, codec) for codec in parts))
    if family == "hierarchical":
        return AllReduceName(name, _HIERARCHICAL, (_codec_of(name, codecs if colon else "none"),))
    raise ValueError(f"unknown all-reduce {name!r}; choose one of {describe_all_reduce_names()}")


def make_all_reduce(name: str, group: Group) -> AllReduce:
    """The algorithm ``name`` over ``group``; all ranks make the same one.

    Raises:
        ValueError: no such algorithm.
    """
    parsed = parse_all_reduce(name)
    module, attribute = parsed.target.split(":")
    algorithm = getattr(import_module(module), attribute)
    if name in ALL_REDUCE:
        return algorithm(group)
    return algorithm(group, *parsed.codecs, name=name)


def _codec_of(name: str, codec: str) -> Codec:
    try:
        return parse_codec(codec)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
