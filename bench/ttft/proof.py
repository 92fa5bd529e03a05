"""Proof of what ran: the ranks' own counts against what the policy says and the algorithms' formulas give.

An arm that silently ran another algorithm, or sent other bytes than its codec makes, fails the bench. Untimed, every
message of every rank is compared (``traced_faults``); timed, the totals of rank 0 (``counted_faults``).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightwire.bench.ttft.plan import Cell
from tightwire.bench.ttft.wire import WireFormulas
from tightwire.comm.ledger.ledger import Count
from tightwire.model.step_arrays import cut_row

_OP = "all_reduce"
_SITES = ("o_proj", "down_proj")
_PHASES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What a step of the served model sends."""

    num_layers: int
    row_bytes: int  # of one token's hidden state
    step_tokens: int  # a longer prompt goes in chunks of so many
    overlap: bool = False  # steps with a prompt are cut in two, and each half is summed by itself

    def parts(self, num_rows: int) -> list[int]:
        """The rows of each message of a step with ``num_rows`` of a prompt."""
        row = cut_row(num_rows) if self.overlap else 0
        return [row, num_rows - row] if row else [num_rows]


class Message(NamedTuple):
    """One AllReduce of the model: how it is summed, in a step of which phase, and its size."""

    algorithm: str
    phase: str
    message_bytes: int


class ArmPolicy:
    """One arm's lines of GET /comm: which algorithm sums which message."""

    def __init__(self, choices: Sequence[Mapping[str, Any]]) -> None:
        self._choices = choices

    def algorithm(self, site: str, layer: int, phase: str, message_bytes: int) -> str:
        """What sums such a message.

        Raises:
            ValueError: no line is for it.
        """
        for line in self._choices:
            layers, limit = line.get("layers"), line["up_to_bytes"]
            if (line["site"], line["phase"]) != (site, phase) or (layers is not None and layer not in layers):
                continue
            if limit is None or message_bytes <= limit:
                return line["algorithm"]
        raise ValueError(f"GET /comm says of no AllReduce that it sums {site} of layer {layer} in {phase}")

    def algorithms(self, phase: str, *sites: str) -> set[str]:
        """All that may sum messages of these sites."""
        return {line["algorithm"] for line in self._choices if line["phase"] == phase and line["site"] in sites}


@dataclass(frozen=True, slots=True)
class Proof:
    shape: ModelShape
    formulas: WireFormulas

    def traced_faults(self, policy: ArmPolicy, events: Iterable[Mapping[str, Any]]) -> list[str]:
        """What is wrong with the AllReduces of one arm, recorded on all ranks; empty when nothing is."""
        found: Counter[str] = Counter()
        sums = [event for event in events if _is_sum(event)]
        for event in sums:
            _, _, algorithm = event["name"].partition(" ")
            details = event["args"]
            site, _, layer = details["site"].partition(" ")
            phase, size = "prefill" if site == "embed" else details["phase"], details["message_bytes"]
            wanted = policy.algorithm(site, int(layer or 0), phase, size)
            if algorithm != wanted:
                found[f"{site} in {phase} was summed by {algorithm}, and the policy says {wanted}"] += 1
                continue
            sent, formula = details["bytes_sent"], self.formulas.sent(algorithm, event["pid"], size)
            if sent != formula:
                what = f"{algorithm} of {size} B on rank {event['pid']}"
                found[f"{what} sent {sent} B, and its formula says {formula}"] += 1
        if not prompt_sums(sums):
            return ["no AllReduce of prompt rows was recorded"]
        return [f"{fault} ({times} times)" for fault, times in found.items()]

    def counted_faults(self, policy: ArmPolicy, cell: Cell, output_len: int, counts: Sequence[Count]) -> list[str]:
        """What is wrong with rank 0's totals of one entry; empty when nothing is.

        With one request at a time every message is known, and totals must be equal. With more, how rows share steps is
        not, so which algorithms, how many bytes of messages, and bytes sent to within the rounding of slices.
        """
        sums = [count for count in counts if count.op == _OP and count.phase in _PHASES]
        if cell.concurrency > 1:
            return self._shared_faults(policy, cell, output_len, sums)
        seen = {(c.algorithm, c.phase): (c.calls, c.message_bytes, c.bytes_sent) for c in sums}
        wanted = self._alone(policy, cell.prompt_len, output_len)
        return [
            f"{algorithm} in {phase}: {_totals(seen.get((algorithm, phase)))}, and it should be "
            f"{_totals(wanted.get((algorithm, phase)))}"
            for algorithm, phase in sorted(seen.keys() | wanted.keys())
            if seen.get((algorithm, phase)) != wanted.get((algorithm, phase))
        ]

    def messages(self, policy: ArmPolicy, prompt_len: int, output_len: int) -> Iterator[Message]:
        """Every AllReduce of a request that has its steps to itself, one part of a step after the other."""
        whole, rest = divmod(prompt_len, self.shape.step_tokens)
        steps = [("prefill", self.shape.step_tokens)] * whole + [("prefill", rest)] * bool(rest)
        parts = [(phase, part) for phase, rows in steps for part in self.shape.parts(rows)]
        for phase, rows in [*parts, *[("decode", 1)] * (output_len - 1)]:
            size = rows * self.shape.row_bytes
            yield Message(policy.algorithm("embed", 0, "prefill", size), phase, size)
            for layer in range(self.shape.num_layers):
                for site in _SITES:
                    yield Message(policy.algorithm(site, layer, phase, size), phase, size)

    def _alone(
        self, policy: ArmPolicy, prompt_len: int, output_len: int
    ) -> dict[tuple[str, str], tuple[int, int, int]]:
        """Calls, message bytes and bytes sent by (algorithm, phase)."""
        totals: dict[tuple[str, str], tuple[int, int, int]] = {}
        for name, phase, size in self.messages(policy, prompt_len, output_len):
            calls, message_bytes, sent = totals.get((name, phase), (0, 0, 0))
            totals[name, phase] = calls + 1, message_bytes + size, sent + self.formulas.sent(name, 0, size)
        return totals

    def _shared_faults(self, policy: ArmPolicy, cell: Cell, output_len: int, sums: Sequence[Count]) -> list[str]:
        faults: list[str] = []
        everywhere = policy.algorithms("prefill", "embed")
        for count in sums:
            # Generated rows may travel in a prompt's message where both are summed alike.
            allowed = everywhere | policy.algorithms(count.phase, *_SITES)
            if count.algorithm not in allowed:
                faults.append(f"{count.algorithm} ran in {count.phase}, where the policy has {sorted(allowed)}")
                continue
            mean = count.message_bytes // count.calls
            wanted = count.calls * self.formulas.sent(count.algorithm, 0, mean)
            if abs(count.bytes_sent - wanted) > count.calls * self.formulas.slack(count.algorithm):
                faults.append(
                    f"{count.algorithm} in {count.phase} sent {count.bytes_sent} B in {count.calls} calls, and its "
                    f"formula says about {wanted}"
                )
        rows = cell.concurrency * (cell.prompt_len + output_len - 1)
        self._compare("all messages", (2 * self.shape.num_layers + 1) * rows, sums, faults)
        apart = policy.algorithms("prefill", *_SITES) - policy.algorithms("decode", *_SITES) - everywhere
        if apart == policy.algorithms("prefill", *_SITES):
            rows = cell.concurrency * cell.prompt_len
            own = [count for count in sums if count.algorithm in apart]
            self._compare(f"messages of {', '.join(sorted(apart))}", 2 * self.shape.num_layers * rows, own, faults)
        return faults

    def _compare(self, what: str, rows: int, sums: Sequence[Count], faults: list[str]) -> None:
        seen, wanted = sum(count.message_bytes for count in sums), rows * self.shape.row_bytes
        if seen != wanted:
            faults.append(f"{what} had {seen} B in all, and should have {wanted}")


def prompt_sums(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The AllReduces of prompt rows among recorded events, without those of embeddings, which are exact in all arms."""
    sums = (event for event in events if _is_sum(event))
    return [event for event in sums if event["args"]["phase"] == "prefill" and event["args"]["site"] != "embed"]


def _is_sum(event: Mapping[str, Any]) -> bool:
    """Whether it is a whole AllReduce of the model."""
    if event["ph"] != "X" or event["name"].partition(" ")[0] != _OP:
        return False
    details = event.get("args", {})
    return details["phase"] in _PHASES and not details.get("unfinished")


def _totals(totals: tuple[int, int, int] | None) -> str:
    if totals is None:
        return "not used"
    calls, message_bytes, sent = totals
    return f"{calls} calls for {message_bytes} B that sent {sent} B"
