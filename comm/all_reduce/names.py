"""The names of the AllReduces. Imports no torch: options, help texts and messages read them before a rank starts."""

from tightwire.comm.all_reduce.entry import Entry
from tightwire.comm.codec.codec_names import has_feedback, parse_format

# By algorithm. To add one, write its file, with an ``ENTRY`` made from its row, and add the row.
NAMES: dict[str, Entry] = {
    row.name: row
    for row in (
        Entry(name="auto", module="tightwire.comm.policy.routes"),
        Entry(name="one-shot", module="tightwire.comm.all_reduce.one_shot"),
        Entry(name="two-shot", module="tightwire.comm.all_reduce.two_shot"),
        Entry(name="ring", module="tightwire.comm.all_reduce.ring"),
        Entry(name="native", module="tightwire.comm.all_reduce.native"),
        Entry(
            name="flash",
            module="tightwire.comm.all_reduce.flash",
            num_codecs=2,
            patterns={"flash:RS,AG": "a codec for each leg, such as flash:int4,int8 or flash:int4-g64-had,int6"},
            # Codecs of the reduce-scatter and the all-gather leg. docs/quantized-allreduce.md has the reasons for these.
            presets={
                "flash-int8": ("int8-g64-sym-had-ef", "int8-g64-sym-had-ef"),
                "flash-int6": ("int6-g64-sym-had-ef", "int6-g64-sym-had-ef"),
                "flash-int5": ("int5-g64-sym-had-ef", "int5-g64-sym-had-ef"),
                "flash-int4": ("int4-g64-sym-had-ef", "int4-g64-sym-had-ef"),
                "flash-int3": ("int3-g64-sym-had-ef", "int3-g64-sym-had-ef"),
                # As published, for comparison.
                "flash-int8-plain": ("int8", "int8"),
                "flash-int6-plain": ("int4", "int8"),
                "flash-int5-plain": ("int5", "int5"),
                "flash-int4-plain": ("int4", "int4"),
            },
            exact_codecs=None,
            takes_feedback=True,
        ),
        Entry(
            name="hierarchical",
            module="tightwire.comm.all_reduce.hierarchical",
            num_codecs=1,
            patterns={
                "hierarchical": "inside each node, then between nodes",
                "hierarchical:CODEC": "the same with the leg between nodes quantized, such as hierarchical:int8",
            },
            exact_codecs=("none",),
        ),
    )
}


def split_all_reduce_names(text: str) -> tuple[str, ...]:
    """Split at commas and strip blanks; the comma inside ``flash:RS,AG`` does not separate names."""
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        if names and names[-1].startswith("flash:") and "," not in names[-1]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(names)


def plain_names() -> list[str]:
    """The names of algorithms that take no codecs; all are lossless."""
    return sorted(name for name, entry in NAMES.items() if not entry.num_codecs)


def preset_names() -> list[str]:
    return [name for entry in NAMES.values() for name in entry.presets]


def main_preset_names() -> list[str]:
    """The presets for use, from most to least bits, without the published ones."""
    return [name for name in preset_names() if not name.endswith("-plain")]


def all_reduce_names() -> list[str]:
    """All names without explicit codecs, for tests, self-tests and benchmarks."""
    bare = [name for name, entry in NAMES.items() if entry.num_codecs and entry.exact_codecs is not None]
    return [*plain_names(), *preset_names(), *bare]


def describe_all_reduce_names() -> str:
    patterns = [pattern for entry in NAMES.values() for pattern in entry.patterns]
    return f"{', '.join([*plain_names(), *preset_names(), *patterns])} (with codecs such as int8, int4-g32, none)"


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """The algorithm that ``name`` means, and the names of its codecs. Raises ValueError with the valid forms."""
    for family, entry in NAMES.items():
        if name in entry.presets:
            return family, entry.presets[name]
    family, colon, given = name.partition(":")
    entry = NAMES.get(family)
    if entry is None or (colon and not entry.num_codecs) or (not colon and entry.exact_codecs is None):
        raise ValueError(f"unknown all-reduce {name!r}; choose one of {describe_all_reduce_names()}")
    if not colon:
        return family, entry.exact_codecs or ()
    codecs = (given,) if entry.num_codecs == 1 else tuple(given.split(","))
    if len(codecs) != entry.num_codecs:
        raise ValueError(
            f"{name!r} needs two codecs, for the reduce-scatter and the all-gather leg, such as flash:int4,int8"
        )
    for codec in codecs:
        try:
            parse_format(codec)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        if has_feedback(codec) and not entry.takes_feedback:
            raise ValueError(f"{name!r}: {family} has no error feedback (-ef), only flash has; leave -ef out")
    return family, codecs
