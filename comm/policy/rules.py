"""The policy: rules that name an AllReduce for each message, made once by ``choose`` and given to every rank.

A message has a site (its place in the model), a layer, a phase (prefill or decode rows) and a size. This module has
names only and imports no torch; ``routes`` turns names into AllReduces.
"""

from collections.abc import Mapping, Sequence

import msgspec

SITES = ("embed", "o_proj", "down_proj")
PHASES = ("prefill", "decode")


class QuarantinedError(ValueError):
    """Some messages have no AllReduce left: every algorithm that the policy allows there failed the self-test."""


class Choice(msgspec.Struct, frozen=True):
    """Messages up to ``up_to_bytes`` (None: of any size) use the first of ``algorithms``.

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
    layers: tuple[int, ...] | None = None  # None: all


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
        """The policy with some algorithms quarantined; ``wrong`` maps each to the error found.

        Raises QuarantinedError: some messages have no algorithm left.
        """
        rules = (
            msgspec.structs.replace(rule, choices=_merged([_allowed(rule, choice, wrong) for choice in rule.choices]))
            for rule in self.rules
        )
        return Policy(tuple(rules))


def one_for_all(name: str) -> Policy:
    """Use one AllReduce for every message, regardless of cost and accuracy."""
    choices = (Choice(up_to_bytes=None, algorithms=(name,), reason="for everything"),)
    return Policy(tuple(Rule(site, phase, choices) for site in SITES for phase in PHASES))


def describe_layers(layers: Sequence[int]) -> str:
    """Format rising layer numbers, such as ``layers 0-3, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(spans)}"


def _allowed(rule: Rule, choice: Choice, wrong: Mapping[str, str]) -> Choice:
    left = tuple(name for name in choice.algorithms if name not in wrong)
    if not left:
        found = "; ".join(f"{name}: {wrong[name]}" for name in choice.algorithms)
        raise QuarantinedError(
            f"{rule.phase} messages of {rule.site} have no AllReduce left, because the self-test found {found}. "
            "Choose another --allreduce, or another --transport"
        )
    first = choice.algorithms[0]
    if left[0] == first:
        return msgspec.structs.replace(choice, algorithms=left)
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
