"""Proves after every turn which AllReduce ran: compares rank 0's counters with the policy and with the byte formulas."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tightwire.comm.all_reduce.entry import ELEM_BYTES
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.nodes import in_process_node_groups
from tightwire.comm.ledger.ledger import Count
from tightwire.comm.policy.rules import DROP
from tightwire.comm.protocols import AllReduce
from tightwire.model.step import cut_row

SITES = ("o_proj", "down_proj")  # whose sums an arm chooses
_OP = "all_reduce"
_PHASES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    prompt_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt_len} prompt tokens, {self.concurrency} at a time"


class ArmPolicy:
    """One arm's lines of GET /comm: which algorithm sums which message."""

    def __init__(self, choices: Sequence[Mapping[str, Any]]) -> None:
        self._choices = choices

    def algorithm(self, site: str, layer: int, phase: str, message_bytes: int) -> str:
        """The algorithm that sums such a message; ValueError if no line covers it."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The facts that determine the messages of a step of the served model, and their bytes on the wire."""

    num_layers: int
    row_elems: int  # of one token's hidden state
    dtype: str  # of partial sums
    step_tokens: int  # longer prompts are split into chunks of this size
    overlap: bool = False  # a step with prompt rows is cut in two halves that are summed separately
    world_size: int
    num_nodes: int  # as the algorithms know them

    @property
    def row_bytes(self) -> int:
        return self.row_elems * ELEM_BYTES[self.dtype]

    def sent_bytes(self, algorithm: str, message_bytes: int) -> int:
        """Bytes that rank 0 sends in one AllReduce, by the algorithm's formula."""
        elem_bytes = ELEM_BYTES[self.dtype]
        return _make(algorithm, self.world_size, self.num_nodes).wire_bytes(message_bytes // elem_bytes, elem_bytes)

    def faults(self, policy: ArmPolicy, cell: Cell, output_len: int, counts: Sequence[Count]) -> list[str]:
        """Faults in rank 0's totals of one turn; empty when there are none.

        How several requests share steps is not known, so then only algorithms and the sum of all bytes are checked.
        """
        sums = [count for count in counts if count.op == _OP and count.phase in _PHASES]
        if cell.concurrency > 1:
            return self._shared_faults(policy, cell, output_len, sums)
        seen = {(c.algorithm, c.phase): (c.calls, c.message_bytes, c.bytes_sent) for c in sums}
        expected: dict[tuple[str, str], tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
        for name, phase, size in self.messages(policy, cell.prompt_len, output_len):
            calls, message_bytes, sent = expected[name, phase]
            expected[name, phase] = calls + 1, message_bytes + size, sent + self.sent_bytes(name, size)
        return [
            f"{key[0]} in {key[1]}: {_totals(seen.get(key))}, expected {_totals(expected.get(key))}"
            for key in sorted(seen.keys() | expected.keys())
            if seen.get(key) != expected.get(key)
        ]

    def messages(self, policy: ArmPolicy, prompt_len: int, output_len: int) -> Iterator[tuple[str, str, int]]:
        """Algorithm, phase and bytes of every AllReduce of a request that shares its steps with no other."""
        whole, rest = divmod(prompt_len, self.step_tokens)
        chunks = [self.step_tokens] * whole + [rest] * bool(rest)
        cuts = [(cut_row(chunk) if self.overlap else 0, chunk) for chunk in chunks]
        parts = [("prefill", rows) for cut, chunk in cuts for rows in (cut, chunk - cut) if rows]
        for phase, rows in [*parts, *[("decode", 1)] * (output_len - 1)]:
            size = rows * self.row_bytes
            yield policy.algorithm("embed", 0, "prefill", size), phase, size
            for layer in range(self.num_layers):
                for site in SITES:
                    if (name := policy.algorithm(site, layer, phase, size)) != DROP:
                        yield name, phase, size

    def _shared_faults(self, policy: ArmPolicy, cell: Cell, output_len: int, sums: Sequence[Count]) -> list[str]:
        faults: list[str] = []
        embed = policy.algorithms("prefill", "embed")
        for count in sums:
            # Decode rows may travel in a prompt's message where both are summed by the same algorithm.
            allowed = embed | policy.algorithms(count.phase, *SITES)
            if count.algorithm not in allowed:
                faults.append(f"{count.algorithm} ran in {count.phase}, but the policy names {sorted(allowed)}")
        rows = cell.concurrency * (cell.prompt_len + output_len - 1)
        seen, expected = sum(count.message_bytes for count in sums), (2 * self.num_layers + 1) * rows
        if seen != expected * self.row_bytes:
            faults.append(f"all messages had {seen} B, expected {expected * self.row_bytes}")
        return faults


@cache
def _make(algorithm: str, world_size: int, num_nodes: int) -> AllReduce:
    """The algorithm on rank 0; nothing is sent."""
    return make_all_reduce(algorithm, in_process_node_groups(world_size, num_nodes)[0])


def _totals(totals: tuple[int, int, int] | None) -> str:
    if totals is None:
        return "not used"
    calls, message_bytes, sent = totals
    return f"{calls} calls of {message_bytes} B that sent {sent} B"
