"""Predicts first and further tokens by layout (docs/layouts.md) from hosts' rates, the work of a row and a link.

A host computes R rows of a layer, each of which attends to C tokens, in

    bytes / read + min(R - 1, 15) * flops / few + max(R - 16, 0) * flops / many + R * C * pair flops / attention

Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING

import msgspec

from tightwire.comm.link.link import Link
from tightwire.comm.policy.schedule import FEW_ROWS, HostRates, overlapped_s, staged_s
from tightwire.server.config.chunks import ChunkTimes

if TYPE_CHECKING:  # its codecs are torch's
    from tightwire.comm.policy.choose import Chooser

PROMPTS = (128, 512, 4096)
CROWD, CROWD_PROMPT, CROWD_TOKENS = 16, 128, 64  # requests at once, tokens of each prompt and answer
REQUEST = (512, 128)  # tokens of prompt and answer by which layouts are compared
_STEP_ROWS, _PART_ROWS = 512, 64  # of a prompt's step, and of one that is computed in two parts
# To receive a request, to plan a step, to choose and send a token, to hand a message to another host, to go from a layer to its sum.
_REQUEST_S, _STEP_S, _ANSWER_S, _HOP_S, _CALL_S = 6e-3, 1.2e-3, 0.3e-3, 60e-6, 20e-6
# In hybrid, whose stages multiply with matrices in two parts: this share and seconds more a layer; copying of what is handed over, a byte.
_JOINED_SHARE, _JOINED_S, _COPYING_S = 0.15, 0.2e-3, 5e-9
# Moving costs the cores that compute so many seconds a byte (measured between namespaces), but at most this share of its time;
# messages that a socket's buffer takes at once do not.
_MOVING_S, _MOVING_SHARE, _BUFFER_BYTES = 2.5e-9, 0.3, 64 << 10
HIDDEN_BYTES, HIDDEN_SHARE = 4, 0.5  # of a hidden state's number; of the wire, while keys and values of hybrid move
Stages = Sequence[tuple[int, int]]  # the first layer of each, and the one after its last
Sums = Callable[[str, int], list[tuple[float, float]]]  # (phase, rows) -> seconds of computing and moving of each sum


@dataclass(frozen=True, kw_only=True, slots=True)
class RowWork:
    """What computing one row takes. Operations are two for each multiplication."""

    num_layers: int
    row_elems: int  # of a hidden state
    layer_bytes: float
    layer_flops: float
    pair_flops: float  # of attention, for each token that a row attends to, in one layer
    head_bytes: float
    head_flops: float
    handed_bytes: float = 0.0  # keys and values of a layer that a stage of hybrid sends to the other hosts

    def layer_s(self, host: HostRates, rows: float, context: float) -> float:
        attention_s = rows * context * self.pair_flops / host.attention_flops
        return host.seconds(self.layer_bytes, self.layer_flops, rows) + attention_s

    def speeds(self, hosts: Sequence[HostRates], rows: int) -> list[float]:
        """The layers that each host computes a second."""
        return [1 / self.layer_s(host, rows, rows) for host in hosts]

    def head_s(self, host: HostRates, rows: float) -> float:
        return host.seconds(self.head_bytes, self.head_flops, rows)


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token by prompt length and of a further token, and tokens a second of ``CROWD`` requests."""

    layout: str
    all_reduce: str  # as requested; empty: nothing is summed
    ttft_s: dict[int, float]
    token_s: float
    crowd_tokens_per_s: float
    # From the first token of ``REQUEST`` until the second may begin: keys and values of hybrid arrive.
    handed_s: float = 0.0

    @property
    def request_s(self) -> float:
        return self.ttft_s[REQUEST[0]] + self.handed_s + REQUEST[1] * self.token_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Times of one model on ``hosts`` joined by ``link``."""

    work: RowWork
    hosts: Sequence[HostRates]
    shares: Sequence[float]  # each host's part of every tensor; they add up to 1
    link: Link
    ranks_each: int = 1  # ranks of a host

    def times(self, layout: str, all_reduce: str, sums: Sums | None, stages: Stages = ()) -> Times:
        """``sums``: of tensor and hybrid; None on one host. ``stages``: of hybrid and pipeline."""
        adding = sums or (lambda phase, rows: [(0.0, 0.0)] * self.work.num_layers)

        def prompts_s(sizes: Sequence[int]) -> tuple[float, float]:
            handed = self.work.handed_bytes if layout == "hybrid" else 0.0
            return self._staged_s(sizes, stages, handed) if stages else (self._tensor_s(sizes, adding), 0.0)

        def token_s(rows: int) -> float:
            return self._staged_token_s(rows, stages) if layout == "pipeline" else self._token_s(rows, adding)

        crowd_s = sum(prompts_s([CROWD_PROMPT] * CROWD)) + CROWD_TOKENS * token_s(CROWD)
        return Times(
            layout=layout,
            all_reduce=all_reduce,
            ttft_s={length: _REQUEST_S + prompts_s([length])[0] for length in PROMPTS},
            token_s=token_s(1),
            crowd_tokens_per_s=CROWD * CROWD_TOKENS / crowd_s,
            handed_s=prompts_s([REQUEST[0]])[1],
        )

    def _slowest_s(self, work_s: Callable[[HostRates], float]) -> float:
        return max(share * work_s(host) for share, host in zip(self.shares, self.hosts, strict=True))

    def _answer_s(self) -> float:
        """Candidates or token ids, some bytes, go to another host."""
        return _HOP_S + self.link.latency_s if len(self.hosts) > 1 else 0.0

    def _tensor_s(self, sizes: Sequence[int], sums: Sums) -> float:
        work, total_s = self.work, self._answer_s() + self._slowest_s(lambda host: self.work.head_s(host, len(sizes)))
        for rows, context in _steps(sizes, _STEP_ROWS):
            halved = rows >= _PART_ROWS and len(self.hosts) > 1
            part = rows // 2 if halved else rows
            adding = sums("prefill", part)
            own_s = work.num_layers * self._slowest_s(partial(work.layer_s, rows=part, context=context)) / len(adding)
            total_s += _STEP_S + (overlapped_s(own_s, adding) if halved else sum(own_s + sum(each) for each in adding))
        return total_s

    def _token_s(self, rows: int, sums: Sums) -> float:
        work = self.work
        own_s = self._slowest_s(
            lambda host: work.num_layers * work.layer_s(host, rows, CROWD_PROMPT) + work.head_s(host, rows)
        )
        return _STEP_S + own_s + sum(map(sum, sums("decode", rows))) + self._answer_s() + rows * _ANSWER_S

    def _stages_s(self, rows: float, context: float, stages: Stages, handed: float = 0.0) -> list[float]:
        """Computing of each stage; several ranks sum twice a layer, in memory. ``handed``: bytes of a row and layer, in hybrid."""
        sums_s = 2 * _CALL_S if self.ranks_each > 1 else 0.0
        share, besides_s = (1 + _JOINED_SHARE, _JOINED_S + _COPYING_S * handed * rows) if handed else (1.0, 0.0)
        each_s = (sums_s + besides_s + share * self.work.layer_s(own, rows, context) for own in self.hosts)
        return [_STEP_S + (end - start) * own_s for (start, end), own_s in zip(stages, each_s, strict=True)]

    def _hop_s(self, rows: float) -> float:
        return _HOP_S + self.link.seconds(rows * self.work.row_elems * HIDDEN_BYTES)

    def _staged_s(self, sizes: Sequence[int], stages: Stages, handed: float) -> tuple[float, float]:
        """The first token, and from there until the keys and values have come."""
        steps = self._chunks(sizes, stages, handed)
        chunks = [self._stages_s(*step, stages, handed) for step in steps]
        behind_s = (stages[0][1] - stages[0][0]) * handed / (self.link.bytes_per_s or inf)
        beside_s = [rows * behind_s for rows, _ in steps]
        passing_s, settled_s = staged_s(chunks, [self._hop_s(rows) for rows, _ in steps], beside_s)
        first_s = passing_s + self.work.head_s(self.hosts[-1], len(sizes)) + self._answer_s()
        return first_s, max(0.0, settled_s - first_s)

    def _chunks(self, sizes: Sequence[int], stages: Stages, handed: float) -> list[tuple[int, float]]:
        """The chunks that the engine makes once it has measured them: rows, and the tokens that a row attends to in the mean."""
        few_s = [max(self._stages_s(FEW_ROWS, context, stages, handed)) for context in (0.0, 1.0)]
        row_s = max(self._stages_s(FEW_ROWS + 1, 0.0, stages, handed)) - few_s[0]
        times = ChunkTimes(few_s[0] - FEW_ROWS * row_s, row_s, (few_s[1] - few_s[0]) / FEW_ROWS)
        moving_s = self.work.row_elems * HIDDEN_BYTES / (self.link.bytes_per_s or inf) / (HIDDEN_SHARE if handed else 1)
        part_s, start, found = times.part_s([(0, size) for size in sizes], len(stages), moving_s), 0, []
        if len(sizes) > 1:
            return _steps(sizes, min(_STEP_ROWS, times.num_rows(0, part_s)))
        while start < sizes[0]:
            rows = min(_STEP_ROWS, times.num_rows(start, part_s), sizes[0] - start)
            found.append((rows, start + rows / 2))
            start += rows
        return found

    def _staged_token_s(self, rows: int, stages: Stages) -> float:
        """One token of each sequence, which pass the stages in groups."""
        groups = min(rows, len(stages))
        each_s = self._stages_s(rows / groups, CROWD_PROMPT, stages)
        each_s[-1] += self.work.head_s(self.hosts[-1], rows / groups)
        passing_s = sum(each_s) + (len(stages) - 1) * self._hop_s(rows / groups) + self._answer_s()
        return max(groups * max(each_s), passing_s) + rows * _ANSWER_S


def sums_of(chooser: "Chooser", num_layers: int, row_bytes: int, link: Link) -> Sums:
    """The sums of a step by the chooser's policy, in their order; that of the embedding comes first."""
    policy, busy = chooser.policy(), min(_MOVING_SHARE, _MOVING_S * (link.bytes_per_s or 0.0))
    places = [("embed", 0), *((site, layer) for layer in range(num_layers) for site in ("o_proj", "down_proj"))]

    @cache
    def of(phase: str, rows: int) -> list[tuple[float, float]]:
        found, size = [], rows * row_bytes
        for site, layer in places:
            choices = policy.choices(site, layer, phase)
            choice = next(own for own in choices if own.up_to_bytes is None or size <= own.up_to_bytes)
            computing_us, moving_us = chooser.parts_us(choice.algorithms[0], size)
            moving_s, busy_s = moving_us / 1e6, busy * max(0.0, 1 - _BUFFER_BYTES / size) * moving_us / 1e6
            found.append((computing_us / 1e6 + _CALL_S + busy_s, moving_s))
        return found

    return of


def _steps(sizes: Sequence[int], most_rows: int) -> list[tuple[int, float]]:
    """The steps of prompts: rows, and the tokens that a row attends to in the mean. Short prompts share a step."""
    if len(sizes) > 1 and sizes[0] <= most_rows:
        together = most_rows // sizes[0]
        return [(sizes[0] * together, sizes[0] / 2)] * -(-len(sizes) // together)
    starts = [(size, start) for size in sizes for start in range(0, size, most_rows)]
    return [(rows, start + rows / 2) for size, start in starts for rows in (min(most_rows, size - start),)]
