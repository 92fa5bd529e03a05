"""Makes the policy: an AllReduce for each site, phase and size, with the reasons. The only definition of ``auto``.

Two rules precede speed. A lossy algorithm is chosen only if it was named or the error budget of the phase allows it.
And within a phase a row's sum must not depend on the size of its message, or a text would depend on other
requests. So ``auto`` first chooses an order of adding for the phase, and switches by size only between algorithms of
that order, which give the same bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import msgspec

from tightwire.comm.all_reduce.entry import NODE_ORDER, RANK_ORDER
from tightwire.comm.all_reduce.make import lossless_names, lossy_names, parse_all_reduce
from tightwire.comm.codec.error_bounds import relative_rms_error
from tightwire.comm.policy import rules
from tightwire.comm.policy.accuracy import Accuracy
from tightwire.comm.policy.cost import CostModel, size_grid
from tightwire.comm.policy.error_budget import ErrorBudget
from tightwire.comm.policy.rules import DROP, WHY_GUARDED, Choice, FileRule, Policy, PolicyFile, Rule
from tightwire.sizes import format_bytes

_KEEP_WITHIN = 1.03  # a switch must gain more than the repeatability of medians
_LEAST_GAIN = f"{100 * (_KEEP_WITHIN - 1):.0f} %"
_DECODE_ROWS = (1, 4, 16)  # message sizes for choosing a phase's order of adding
_PREFILL_SHARES = (0.25, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRequest:
    """The user's options, and the model's messages: rows of ``row_elems``, up to ``max_rows`` in a step."""

    row_elems: int
    max_rows: int
    max_decode_rows: int
    num_layers: int = 0  # 0: not known
    allreduce: str = "auto"
    flag: str = "--allreduce"  # that named ``allreduce``
    decode: str | ErrorBudget | None = None  # a name, or a budget of auto in decode rows
    budget: ErrorBudget | None = None  # of auto in prefill rows
    accuracy: Accuracy = field(default_factory=Accuracy)  # what quantized sums cost
    file: PolicyFile | None = None  # takes precedence over all of the above
    file_name: str = ""

    def __post_init__(self) -> None:
        for name in (self.allreduce, self.decode):
            if isinstance(name, str):
                parse_all_reduce(name)

    def lossy_names(self) -> list[str]:
        """The quantized names worth measuring, with codec groups that fill whole rows if possible."""
        suffix = next((f"-g{size}" for size in (64, 32) if self.row_elems % size == 0), "")
        return lossy_names("" if self.row_elems % 128 == 0 else suffix)

    def asked(self, site: str, phase: str, layer: int = 0) -> tuple[str, str]:
        """The name requested, maybe ``auto``, and the flag or file that requests it."""
        for rule in () if self.file is None else self.file.rules:
            if (rule.site, rule.phase) == (site, phase) and (rule.layers is None or layer in rule.layers):
                return rule.algorithm, f"policy file {self.file_name}"
        lossless = parse_all_reduce(self.allreduce).lossless
        if site == "embed" and not lossless:
            return "auto", "embeddings are summed exactly, as all ranks but one add zeros"
        if site != "embed" and phase == "decode":
            if self.decode is not None:
                return self.decode if isinstance(self.decode, str) else "auto", f"--allreduce-decode {self.decode}"
            if not lossless:
                return "auto", f"decode rows stay exact: {self.flag} {self.allreduce} is lossy"
        return self.allreduce, f"{self.flag} {self.allreduce}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One algorithm for one message size: its cost, and why it was or was not chosen."""

    algorithm: str
    predicted_us: float  # by the model
    measured_us: float | None
    wire_bytes: int
    error: float  # relative RMS; 0: only the rounding of a sum to the dtype
    chosen: bool
    why: str

    @property
    def us(self) -> float:
        """The time that the choice is based on."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Algorithms that ``auto`` may use in a phase, by order of adding, and the refused ones with the reason."""

    orders: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Chooser:
    """Decides for one request in one setting. It never uses the algorithms in ``wrong`` (name: error), which summed wrongly."""

    def __init__(self, request: PolicyRequest, costs: CostModel, wrong: Mapping[str, str] | None = None) -> None:
        self._request, self._costs, self._wrong = request, costs, dict(wrong or {})
        self.parts_us = costs.parts_us
        self._row_bytes = request.row_elems * costs.setting.elem_bytes
        self._errors: dict[str, float] = {}
        decode = request.decode if isinstance(request.decode, ErrorBudget) else None
        self._budgets = {"prefill": request.budget, "decode": decode, "embed": None}
        self._admitted = {phase: self._admit(phase, budget) for phase, budget in self._budgets.items()}

    def policy(self) -> Policy:
        """Rules for every site and phase; raises QuarantinedError if ``auto`` has no usable algorithm left."""
        own = (Rule(site, phase, self._choices(site, phase)) for site in rules.SITES for phase in rules.PHASES)
        base = Policy(tuple(part for rule in own for part in rules.guarded(rule, self._request.num_layers)))
        file = self._request.file
        if file is None:
            return base
        stated = tuple(msgspec.structs.replace(rule, reason=self._reason(rule)) for rule in file.rules)
        return rules.apply(base, msgspec.structs.replace(file, rules=stated), self._request.file_name)

    @property
    def warning(self) -> str | None:
        """A problem with the request's policy file or KL budget that does not prevent its use, or None."""
        request, accuracy = self._request, self._request.accuracy
        prefill = request.budget if request.allreduce == "auto" else None
        for flag, budget in ("--comm-error-budget", prefill), ("--allreduce-decode", self._budgets["decode"]):
            if budget is not None and budget.is_kl and not accuracy.of_this_model:
                measured = f"the KL {accuracy.measured_on}; `{accuracy.command}` measures this model"
                return f"{flag} {budget} is compared with {measured}"
        world_size = self._costs.setting.world_size
        return None if request.file is None else rules.world_size_warning(request.file, request.file_name, world_size)

    def candidates(self) -> list[str]:
        """Every algorithm worth measuring here, lossless ones first."""
        admitted = self._admit("prefill", ErrorBudget(1.0))
        names = [*admitted.refused, *(name for names in admitted.orders.values() for name in names)]
        names = [name for name in names if self._fits_nodes(name)]
        return sorted(names, key=lambda name: not parse_all_reduce(name).lossless)

    def error(self, name: str) -> float:
        """Relative RMS error of one AllReduce on numbers like activations; 0 for a lossless one."""
        ranks = self._costs.setting.world_size
        if name == DROP:
            return math.sqrt((ranks - 1) / ranks)  # the other ranks' parts are missing
        codecs = parse_all_reduce(name).codecs
        if name not in self._errors:
            self._errors[name] = relative_rms_error(codecs[0], codecs[-1], ranks) if codecs else 0.0
        return self._errors[name]

    def verdicts(self, site: str, phase: str, num_bytes: int, layer: int = 0) -> list[Verdict]:
        """Every candidate for one message: the chosen one first, the others by time."""
        choices = self.policy().choices(site, layer, phase)
        choice = next(choice for choice in choices if choice.up_to_bytes is None or num_bytes <= choice.up_to_bytes)
        chosen, (asked, by) = choice.algorithms[0], self._request.asked(site, phase, layer)
        admitted = self._admitted[_budget_phase(site, phase)]
        verdicts = [_dropped(choice.reason, self.error(DROP))] if chosen == DROP else []
        for name in dict.fromkeys([chosen, *self.candidates()]):
            if name == DROP:
                continue
            prediction = self._costs.predict(name, num_bytes)
            if name == chosen and asked == "auto" and WHY_GUARDED not in choice.reason:
                why = _preface(by) + self._why_chosen(name, num_bytes, admitted)
            elif name == chosen:
                why = choice.reason
            elif asked != "auto":
                why = f"not requested: {by}"
            else:
                why = admitted.refused.get(name) or self._why_not(name, chosen, num_bytes, admitted)
            verdicts.append(
                Verdict(
                    algorithm=name,
                    predicted_us=self._costs.modelled_us(name, num_bytes),
                    measured_us=prediction.us if prediction.measured else None,
                    wire_bytes=self._costs.wire_bytes(name, num_bytes),
                    error=self.error(name),
                    chosen=name == chosen,
                    why=why,
                )
            )
        return sorted(verdicts, key=lambda verdict: (not verdict.chosen, verdict.us))

    def _choices(self, site: str, phase: str) -> tuple[Choice, ...]:
        asked, by = self._request.asked(site, phase)
        if asked == "auto":
            return self._auto_choices(_budget_phase(site, phase), _preface(by))
        quantized = phase == "prefill" and not parse_all_reduce(asked).lossless
        costs = f": {self._request.accuracy.describe(asked)}" if quantized else ""
        return (Choice(up_to_bytes=None, algorithms=(asked,), reason=by + costs + self._crossing_rows(asked, phase)),)

    def _auto_choices(self, phase: str, preface: str) -> tuple[Choice, ...]:
        orders, refused = self._admitted[phase].orders, self._admitted[phase].refused
        if not orders:
            found = "; ".join(f"{name}: {reason}" for name, reason in refused.items() if name in lossless_names())
            raise rules.QuarantinedError(
                f"auto has no AllReduce left for {phase} messages ({found}). Name one with --allreduce, choose another "
                "--transport, or run `tightwire tune` again if the measurements are out of date"
            )
        ranked = sorted(orders, key=lambda order: self._phase_us(phase, orders[order]))
        members = orders[ranked[0]]
        substitutes = [name for order in ranked[1:] for name in orders[order] if order in (RANK_ORDER, NODE_ORDER)]
        grid = size_grid(self._row_bytes, max(self._row_bytes, self._request.max_rows * self._row_bytes))
        leaders: list[tuple[int, str]] = []
        for size in grid:
            best = min(members, key=lambda name: self._us(name, size))
            if leaders and self._us(leaders[-1][1], size) <= _KEEP_WITHIN * self._us(best, size):
                best = leaders[-1][1]
            leaders.append((size, best))
        bands = [list(band)[-1] for _, band in groupby(leaders, key=itemgetter(1))]
        choices = []
        for number, (size, leader) in enumerate(bands):
            others = sorted((name for name in members if name != leader), key=lambda name: self._us(name, size))
            limit = None if number == len(bands) - 1 else size
            why = preface + self._why(phase, leader, others, size)
            choices.append(Choice(up_to_bytes=limit, algorithms=(leader, *others, *substitutes), reason=why))
        return tuple(choices)

    def _admit(self, phase: str, budget: ErrorBudget | None) -> _Admitted:
        admitted, usable = _Admitted(), dict[str, str]()
        for name in [*lossless_names(), *self._request.lossy_names()]:
            order, reason = self._order(name, phase, budget)
            if name in self._wrong:
                admitted.refused[name] = f"summed wrongly when measured: {self._wrong[name]}"
            elif reason is not None:
                admitted.refused[name] = reason
            else:
                usable[name] = order
        # Built-in estimates cannot be compared with measurements, so once any algorithm is measured, the rest are excluded.
        measured = {name for name in usable if self._costs.predict(name, self._row_bytes).measured}
        for name, order in usable.items():
            if measured and name not in measured:
                admitted.refused[name] = "not measured on this host, and others are"
            else:
                admitted.orders.setdefault(order, []).append(name)
        return admitted

    def _fits_nodes(self, name: str) -> bool:
        return not parse_all_reduce(name).needs_nodes or self._costs.setting.num_nodes > 1

    def _order(self, name: str, phase: str, budget: ErrorBudget | None) -> tuple[str, str | None]:
        """The order in which ``name`` adds, and why it may not be used, or None if it may."""
        parsed = parse_all_reduce(name)
        reason = parsed.refusal(self._costs.setting)
        if parsed.lossless or not self._fits_nodes(name):
            return parsed.order, reason
        return name, self._why_too_lossy(name, phase, budget)

    def _why_too_lossy(self, name: str, phase: str, budget: ErrorBudget | None) -> str | None:
        if budget is None:
            return "lossy; no error budget for these rows"
        if crossing := self._crossing_rows(name, phase):
            return f"lossy{crossing}"
        losses, error = self._request.accuracy.losses, self.error(name)
        if budget.is_kl and (name not in losses or losses[name].kl > budget.limit):
            why = f"exceeds the budget of {budget}" if name in losses else "lossy"
            return f"{why}: {self._request.accuracy.describe(name)}"
        exceeds = not budget.is_kl and error > budget.limit
        return f"its error of {error:.3g} exceeds the budget of {budget}" if exceeds else None

    def _crossing_rows(self, name: str, phase: str) -> str:
        """A warning for codec groups that hold numbers of two rows; empty if they do not."""
        group = max((codec.group_elems for codec in parse_all_reduce(name).codecs), default=1)
        if self._request.row_elems % group == 0:
            return ""
        rows = "prefilled" if phase == "prefill" else "generated"
        what = f"a text may depend on what is {rows}"
        return f"; its groups of {group} cross rows of {self._request.row_elems}, so {what} with it"

    def _reason(self, rule: FileRule) -> str:
        if rule.algorithm == DROP:
            return f"{rule.reason}; each rank goes on with its own part".removeprefix("; ")
        quantized = rule.phase == "decode" and not parse_all_reduce(rule.algorithm).lossless
        beside = "; decode rows are quantized" if quantized else ""
        return (rule.reason + beside + self._crossing_rows(rule.algorithm, rule.phase)).removeprefix("; ")

    def _why(self, phase: str, leader: str, others: list[str], size: int) -> str:
        source = "predicted; `tightwire tune` measures"
        if self._costs.predict(leader, size).measured:
            source = "measured on this host"
        elif self._costs.setting.link:
            source = "predicted from the link's rate"
        beside = ""
        if others:
            beside = f", {others[0]} {self._us(others[0], size):.0f} us"
            if self._us(others[0], size) < self._us(leader, size):
                beside += f", which gains less than {_LEAST_GAIN}"
        lossy = ""
        if (budget := self._budgets[phase]) is not None and not parse_all_reduce(leader).lossless:
            loss = self._request.accuracy.describe(leader) if budget.is_kl else f"error {self.error(leader):.3g}"
            lossy = f", {loss} within the budget"
        return f"{self._us(leader, size):.0f} us at {format_bytes(size)}{beside}{lossy} ({source})"

    def _why_chosen(self, chosen: str, num_bytes: int, admitted: _Admitted) -> str:
        members = next(names for names in admitted.orders.values() if chosen in names)
        best = min(members, key=lambda name: self._us(name, num_bytes))
        if self._us(best, num_bytes) < self._us(chosen, num_bytes):
            return f"{best} would gain less than {_LEAST_GAIN}"
        return "fastest lossless" if parse_all_reduce(chosen).lossless else "fastest within the error budget"

    def _why_not(self, name: str, chosen: str, num_bytes: int, admitted: _Admitted) -> str:
        us, best_us = self._us(name, num_bytes), self._us(chosen, num_bytes)
        if us > best_us:
            return f"{us / best_us:.2f} times as slow"
        if any({name, chosen} <= set(names) for names in admitted.orders.values()):
            return f"gains less than {_LEAST_GAIN}"
        return "slower over all sizes of the phase, which uses one order of summing"

    def _phase_us(self, phase: str, names: list[str]) -> float:
        if phase != "prefill":
            rows = [min(count, self._request.max_decode_rows) for count in _DECODE_ROWS]
        else:
            rows = [max(1, round(share * self._request.max_rows)) for share in _PREFILL_SHARES]
        return sum(min(self._us(name, count * self._row_bytes) for name in names) for count in rows)

    def _us(self, name: str, num_bytes: int) -> float:
        return self._costs.predict(name, num_bytes).us


def _dropped(why: str, error: float) -> Verdict:
    return Verdict(algorithm=DROP, predicted_us=0.0, measured_us=None, wire_bytes=0, error=error, chosen=True, why=why)


def _budget_phase(site: str, phase: str) -> str:
    """The key of the error budget that applies; embeddings, which are exact in every phase, have one of their own."""
    return "embed" if site == "embed" else phase


def _preface(by: str) -> str:
    """The reason why ``auto`` decides, if no flag requested it."""
    return "" if by.startswith("--") else f"{by}; "
