"""The policy: rules that name an AllReduce for each message, made by ``choose`` for all ranks; policy files.

A message has a site (its place in the model), a layer, a phase (prefill or decode rows) and a size. Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tightwire.comm.all_reduce.names import preset_names, split_name
from tightwire.comm.codec.codec_names import has_feedback
from tightwire.comm.group.numa import describe_numbers
from tightwire.whole_folder import write_atomic

SITES = ("embed", "o_proj", "down_proj")
# In a policy file, of sums after attention: each rank goes on with its own part, and the sum after the MLP includes all parts.
DROP = "drop"
PHASES = ("prefill", "decode")


class QuarantinedError(ValueError):
    """Some messages have no AllReduce left: every algorithm that the policy allows there failed the self-test."""


class Choice(msgspec.Struct, frozen=True):
    """The algorithms for messages of up to ``up_to_bytes``, or of any size. The first one is used.

    The others, best first, are substitutes if the first fails the self-test. A single one was requested by name.
    """

    up_to_bytes: int | None
    algorithms: tuple[str, ...]
    reason: str


class Rule(msgspec.Struct, frozen=True):
    """Choices for one site and phase, by size: rising limits, the last one None."""

    site: str
    phase: str
    choices: tuple[Choice, ...]
    layers: tuple[int, ...] | None = None  # all without a value


class Policy(msgspec.Struct, frozen=True):
    """Rules for every site and phase. If several match a layer, the first one applies."""

    rules: tuple[Rule, ...]

    def choices(self, site: str, layer: int, phase: str) -> tuple[Choice, ...]:
        for rule in self.rules:
            if (rule.site, rule.phase) == (site, phase) and (rule.layers is None or layer in rule.layers):
                return rule.choices
        raise ValueError(f"the policy has no rule for {site} of layer {layer} in {phase}")

    @property
    def algorithms(self) -> tuple[str, ...]:
        names = (name for rule in self.rules for choice in rule.choices for name in choice.algorithms)
        return tuple(dict.fromkeys(names))

    def without(self, wrong: Mapping[str, str]) -> "Policy":
        """The policy without ``wrong`` (name: error); QuarantinedError if some messages have no algorithm left."""
        rules = (
            msgspec.structs.replace(rule, choices=_merged([_allowed(rule, choice, wrong) for choice in rule.choices]))
            for rule in self.rules
        )
        return Policy(tuple(rules))


def one_for_all(name: str) -> Policy:
    """Use one AllReduce for every message, regardless of cost and accuracy."""
    choices = (Choice(up_to_bytes=None, algorithms=(name,), reason="for everything"),)
    return Policy(tuple(Rule(site, phase, choices) for site in SITES for phase in PHASES))


# Rounding these sums costs accuracy that later sums do not get back: the residual stream is still small in layer 0, and the
# last sum has no later one. The three are a 30th or less of a model's sums.
GUARD = "flash-int8"
WHY_GUARDED = "8 bits in the first layer and the last sum, which cost the most accuracy"
_LEAST_GUARDED = 4  # layers: a smaller model would send most of its sums in 8 bits


def guarded(rule: Rule, num_layers: int) -> tuple[Rule, ...]:
    """``rule``, for all layers, with 8 bits in the first layer and the last sum where a preset has error feedback and less."""
    if not any(_is_guarded(choice.algorithms[0]) for choice in rule.choices) or num_layers < _LEAST_GUARDED:
        return (rule,)
    last = (num_layers - 1,) if rule.site == "down_proj" else ()
    choices = tuple(
        msgspec.structs.replace(
            choice, algorithms=(GUARD, *choice.algorithms[1:]), reason=f"part of {choice.algorithms[0]}: {WHY_GUARDED}"
        )
        if _is_guarded(choice.algorithms[0])
        else choice
        for choice in rule.choices
    )
    return msgspec.structs.replace(rule, choices=choices, layers=(0, *last)), rule


def _is_guarded(name: str) -> bool:
    codecs = split_name(name)[1] if name in preset_names() else ()
    return any(has_feedback(codec) and not codec.startswith("int8") for codec in codecs)


def describe_layers(layers: Sequence[int]) -> str:
    """Format rising layer numbers, such as ``layers 0-3, 7``."""
    return f"layer{'s' if len(layers) > 1 else ''} {describe_numbers(layers).replace(',', ', ')}"


def _allowed(rule: Rule, choice: Choice, wrong: Mapping[str, str]) -> Choice:
    left = tuple(name for name in choice.algorithms if name not in wrong)
    if not left:
        found = "; ".join(f"{name}: {wrong[name]}" for name in choice.algorithms)
        raise QuarantinedError(
            f"{rule.phase} messages of {rule.site} have no AllReduce left, because the self-test found {found}. "
            "Choose another --allreduce, or another --transport"
        )
    first, reason = choice.algorithms[0], choice.reason
    if left[0] != first:
        reason = f"replaces {first}, which failed the self-test ({wrong[first]})"
    return msgspec.structs.replace(choice, algorithms=left, reason=reason)


def _merged(choices: list[Choice]) -> tuple[Choice, ...]:
    merged: list[Choice] = []
    for choice in choices:
        if merged and merged[-1].algorithms[0] == choice.algorithms[0]:
            merged[-1] = msgspec.structs.replace(merged[-1], up_to_bytes=choice.up_to_bytes)
        else:
            merged.append(choice)
    return tuple(merged)


SCHEMA = "tightwire.comm-policy/1"
_CHECKED_FACTS = ("num_layers", "hidden_size", "world_size")


class FileRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One algorithm for the messages of a site and a phase, in some layers or (None) in all."""

    site: Literal["o_proj", "down_proj"]
    phase: Literal["prefill", "decode"]
    algorithm: str
    layers: tuple[int, ...] | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if self.algorithm != DROP:
            split_name(self.algorithm)
        elif self.site != "o_proj":
            raise ValueError(f"{DROP} is for the sums of o_proj; those of {self.site} keep the ranks' residuals equal")
        if self.algorithm == "auto":
            raise ValueError("auto is not an algorithm; messages without a rule use auto, so leave the rule out")
        if self.layers == ():
            raise ValueError("layers is empty; leave it out to mean all layers")
        if self.layers is not None and (min(self.layers) < 0 or len(set(self.layers)) < len(self.layers)):
            raise ValueError(f"layers must be 0 or more and each once, got {list(self.layers)}")


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules, of which the first match applies, and facts about the model they were made for, some of them checked."""

    schema: str = SCHEMA
    made_for: dict[str, Any] = {}
    rules: tuple[FileRule, ...] = ()

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"its schema is {self.schema!r}; this version reads {SCHEMA!r}")
        for fact in _CHECKED_FACTS:
            value = self.made_for.get(fact, 1)
            if type(value) is not int or value < 1:
                raise ValueError(f"made_for.{fact} must be a whole number above 0, got {value!r}")


def read_policy_file(path: Path) -> PolicyFile:
    """Read the file and check everything that needs no model; raises ValueError, which names the problem."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PolicyFile)
    except OSError as error:
        made = "give policy:FILE, a file of `tightwire bench quality --write-policy FILE`"
        raise ValueError(f"the policy file {path} cannot be read: {error.strerror}; {made}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a policy file: {error}; `tightwire bench quality --write-policy` makes one"
        ) from None


def write_policy_file(path: Path, file: PolicyFile) -> None:
    """Write ``file`` atomically. Raises OSError if the folder cannot be written."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


def apply(base: Policy, file: PolicyFile, name: str = "") -> Policy:
    """Put the file's rules, called ``name`` in reasons, before those of ``base``; leave out those for no layer."""
    rules: list[Rule] = []
    # Layers that have a rule, by site and phase; None stands for all.
    taken: dict[tuple[str, str], set[int] | None] = {}
    for rule in [*(_rule(rule, name) for rule in file.rules), *base.rules]:
        kind = (rule.site, rule.phase)
        before = taken.get(kind, set[int]())
        if before is None:
            continue
        if rule.layers is None:
            num_layers = file.made_for.get("num_layers")
            taken[kind] = None
            if num_layers is None or not before.issuperset(range(num_layers)):
                rules.append(rule)
        elif left := tuple(layer for layer in rule.layers if layer not in before):
            taken[kind] = before | set(left)
            rules.append(msgspec.structs.replace(rule, layers=left))
    return Policy(tuple(rules))


def check_shape(file: PolicyFile, name: str, shape: Mapping[str, int]) -> None:
    """Raise ValueError: the file is for another ``shape`` (``num_layers``, ``hidden_size``) or has a missing layer."""
    for fact, value in shape.items():
        made = file.made_for.get(fact)
        if made is not None and made != value:
            raise ValueError(
                f"the policy file {name} was made for {fact} {made}, and this model has {value}; "
                "make one for it with `tightwire bench quality`"
            )
    last = max((layer for rule in file.rules for layer in rule.layers or ()), default=0)
    if last >= shape["num_layers"]:
        raise ValueError(
            f"the policy file {name} has a rule for layer {last}, and the model's layers are 0 to "
            f"{shape['num_layers'] - 1}"
        )


def world_size_warning(file: PolicyFile, name: str, world_size: int) -> str | None:
    made = file.made_for.get("world_size")
    if made is None or made == world_size:
        return None
    return f"the policy file {name} was made for {made} ranks, not {world_size}: its measured error does not apply"


def _rule(rule: FileRule, name: str) -> Rule:
    reason = f"policy file {name}".rstrip() + (f": {rule.reason}" if rule.reason else "")
    choice = Choice(up_to_bytes=None, algorithms=(rule.algorithm,), reason=reason)
    layers = None if rule.layers is None else tuple(sorted(rule.layers))
    return Rule(rule.site, rule.phase, (choice,), layers)
