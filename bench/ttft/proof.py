"""Proves which AllReduce ran: compares the counters with the policy and with the algorithms' byte formulas.

An arm that silently ran another algorithm, or sent other bytes than its codec makes, fails the bench: the counters of rank 0
are compared after every turn.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tightwire.comm.all_reduce.entry import ELEM_BYTES, Setting, Work
from tightwire.comm.all_reduce.registry import make_all_reduce, parse_all_reduce
from tightwire.comm.group.nodes import in_process_node_groups
from tightwire.comm.ledger.counters import Count
from tightwire.model.step_arrays import cut_row

SITES = ("o_proj", "down_proj")  # whose sums an arm chooses
_OP = "all_reduce"
_PHASES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    prompt_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt_len} prompt tokens, {self.concurrency} at a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What determines the messages of a step of the served model."""

    num_layers: int
    row_bytes: int  # of one token's hidden state
    step_tokens: int  # longer prompts are split into chunks of this size
    overlap: bool = False  # a step with prompt rows is cut in two halves that are summed separately

    def message_rows(self, num_rows: int) -> list[int]:
        """The rows of each message of a step with ``num_rows`` prompt rows."""
        row = cut_row(num_rows) if self.overlap else 0
        return [row, num_rows - row] if row else [num_rows]


class Message(NamedTuple):
    """One AllReduce of the model."""

    algorithm: str
    phase: str
    message_bytes: int


class WireUse(NamedTuple):
    """Bytes that one end of the wire carries each way for one prompt, and how often the ranks wait for the wire."""

    wire_bytes: float
    rounds: int

    def bound(self, link: Mapping[str, Any], busy_s: float, ttft_s: float, *, overlap: bool) -> dict[str, float]:
        """The least TTFT on a ``link`` as GET /comm describes it: ``busy_s`` of computing and coding, and the bytes' time.

        With ``overlap`` both happen at once, and the slower of them is the bound.
        """
        rate = link["measured_bytes_per_s"] or link["asked_bytes_per_s"]
        wire_s = (self.wire_bytes / rate if rate else 0.0) + self.rounds * (link["latency_s"] or 0.0)
        bound_s = max(wire_s, busy_s) if overlap else wire_s + busy_s
        return {
            "wire_bytes": self.wire_bytes,
            "wire_s": wire_s,
            "bound_s": bound_s,
            "ttft_over_bound": ttft_s / bound_s,
        }


class WireFormulas:
    """The algorithms' byte formulas for one group of ranks; nothing is sent.

    Args:
        num_nodes: as the algorithms know them (``--nodes``).
        wire_nodes: what the emulated wire joins: the nodes, or every rank when there is one node.
    """

    def __init__(self, *, world_size: int, num_nodes: int, wire_nodes: int, dtype: str) -> None:
        self.world_size, self.elem_bytes = world_size, ELEM_BYTES[dtype]
        self._setting = Setting("process-group", "cpu", world_size, num_nodes, dtype)
        self._per_node = world_size // wire_nodes
        self._group = in_process_node_groups(world_size, num_nodes)[0]
        self.sent = cache(self._sent)  # (name, message bytes): bytes that rank 0 sends

    def slack(self, name: str) -> int:
        """Largest difference in bytes between one message and its share of many, because slices are whole groups."""
        codecs = parse_all_reduce(name).codecs
        group = max((codec.group_elems for codec in codecs), default=1)
        return 2 * self.world_size * group * self.elem_bytes

    def crossing(self, name: str, message_bytes: int) -> float:
        """Bytes that one node's end of the wire carries each way for a message of ``message_bytes``.

        With one rank on a node that is what the rank sends. With several, ranks of all-to-all algorithms send equally to
        all others, and of a ring only a node's last rank sends to the next node.
        """
        entry, sent = parse_all_reduce(name).entry, self.sent(name, message_bytes)
        if self._per_node == 1 or entry.neighbours_only:
            return sent
        if entry.needs_nodes:
            return self._per_node * self._work(name, message_bytes).node_bytes
        return self.all_to_all_crossing(sent)

    def all_to_all_crossing(self, sent: float) -> float:
        """Of the ``sent`` bytes of each rank of an all-to-all exchange."""
        return sent * self._per_node * (self.world_size - self._per_node) / (self.world_size - 1)

    def prompt_use(self, messages: Iterable[Message], gathered_bytes: int) -> WireUse:
        """Of a prompt's AllReduces and the logits gather of its last row, of which a rank sends ``gathered_bytes``."""
        crossing, rounds = self.all_to_all_crossing(gathered_bytes), 1
        for message in messages:
            if message.phase == "prefill":
                crossing += self.crossing(message.algorithm, message.message_bytes)
                work = self._work(message.algorithm, message.message_bytes)
                rounds += work.node_rounds or work.rounds
        return WireUse(crossing, rounds)

    def _sent(self, name: str, message_bytes: int) -> int:
        return make_all_reduce(name, self._group).wire_bytes(message_bytes // self.elem_bytes, self.elem_bytes)

    def _work(self, name: str, message_bytes: int) -> Work:
        parsed = parse_all_reduce(name)
        assert parsed.entry.work is not None, "the policy names an algorithm"
        return parsed.entry.work(self._setting, message_bytes, *parsed.codecs)


class ArmPolicy:
    """One arm's lines of GET /comm: which algorithm sums which message."""

    def __init__(self, choices: Sequence[Mapping[str, Any]]) -> None:
        self._choices = choices

    def algorithm(self, site: str, layer: int, phase: str, message_bytes: int) -> str:
        """What sums such a message.

        Raises:
            ValueError: no line covers it.
        """
        for line in self._choices:
            layers, limit = line.get("layers"), line["up_to_bytes"]
            if (line["site"], line["phase"]) != (site, phase) or (layers is not None and layer not in layers):
                continue
            if limit is None or message_bytes <= limit:
                return line["algorithm"]
        raise ValueError(f"GET /comm names no AllReduce for {site} of layer {layer} in {phase}")

    def algorithms(self, phase: str, *sites: str) -> set[str]:
        """All algorithms that may sum messages of these sites."""
        return {line["algorithm"] for line in self._choices if line["phase"] == phase and line["site"] in sites}


@dataclass(frozen=True, slots=True)
class Proof:
    shape: ModelShape
    formulas: WireFormulas

    def faults(self, policy: ArmPolicy, cell: Cell, output_len: int, counts: Sequence[Count]) -> list[str]:
        """Faults in rank 0's totals of one turn; empty when there are none.

        With one request at a time every message is known, and totals must be equal. With more, how rows share steps is not
        known, so the check is for algorithms, bytes of messages, and bytes sent within the rounding of slices.
        """
        sums = [count for count in counts if count.op == _OP and count.phase in _PHASES]
        if cell.concurrency > 1:
            return self._shared_faults(policy, cell, output_len, sums)
        seen = {(c.algorithm, c.phase): (c.calls, c.message_bytes, c.bytes_sent) for c in sums}
        expected: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
        for name, phase, size in self.messages(policy, cell.prompt_len, output_len):
            calls, message_bytes, sent = expected[name, phase]
            expected[name, phase] = calls + 1, message_bytes + size, sent + self.formulas.sent(name, size)
        return [
            f"{key[0]} in {key[1]}: {_totals(seen.get(key))}, expected {_totals(expected.get(key))}"
            for key in sorted(seen.keys() | expected.keys())
            if seen.get(key) != expected.get(key)
        ]

    def messages(self, policy: ArmPolicy, prompt_len: int, output_len: int) -> Iterator[Message]:
        """Every AllReduce of a request that shares its steps with no other."""
        whole, rest = divmod(prompt_len, self.shape.step_tokens)
        chunks = [self.shape.step_tokens] * whole + [rest] * bool(rest)
        parts = [("prefill", rows) for chunk in chunks for rows in self.shape.message_rows(chunk)]
        for phase, rows in [*parts, *[("decode", 1)] * (output_len - 1)]:
            size = rows * self.shape.row_bytes
            yield Message(policy.algorithm("embed", 0, "prefill", size), phase, size)
            for layer in range(self.shape.num_layers):
                for site in SITES:
                    yield Message(policy.algorithm(site, layer, phase, size), phase, size)

    def _shared_faults(self, policy: ArmPolicy, cell: Cell, output_len: int, sums: Sequence[Count]) -> list[str]:
        faults: list[str] = []
        embed = policy.algorithms("prefill", "embed")
        for count in sums:
            # Decode rows may travel in a prompt's message where both are summed by the same algorithm.
            allowed = embed | policy.algorithms(count.phase, *SITES)
            if count.algorithm not in allowed:
                faults.append(f"{count.algorithm} ran in {count.phase}, but the policy names {sorted(allowed)}")
                continue
            mean = count.message_bytes // count.calls
            expected = count.calls * self.formulas.sent(count.algorithm, mean)
            if abs(count.bytes_sent - expected) > count.calls * self.formulas.slack(count.algorithm):
                faults.append(
                    f"{count.algorithm} in {count.phase} sent {count.bytes_sent} B in {count.calls} calls, but its formula "
                    f"gives about {expected}"
                )
        rows = cell.concurrency * (cell.prompt_len + output_len - 1)
        faults += self._size_fault("all messages", (2 * self.shape.num_layers + 1) * rows, sums)
        prefill = policy.algorithms("prefill", *SITES)
        if not prefill & (policy.algorithms("decode", *SITES) | embed):
            rows = cell.concurrency * cell.prompt_len
            own = [count for count in sums if count.algorithm in prefill]
            faults += self._size_fault(
                f"messages of {', '.join(sorted(prefill))}", 2 * self.shape.num_layers * rows, own
            )
        return faults

    def _size_fault(self, what: str, rows: int, sums: Sequence[Count]) -> list[str]:
        seen, expected = sum(count.message_bytes for count in sums), rows * self.shape.row_bytes
        return [] if seen == expected else [f"{what} had {seen} B in all, expected {expected}"]


def _totals(totals: tuple[int, int, int] | None) -> str:
    if totals is None:
        return "not used"
    calls, message_bytes, sent = totals
    return f"{calls} calls of {message_bytes} B that sent {sent} B"
