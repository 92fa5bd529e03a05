"""Drafts tokens: those that most often followed the last ones earlier in the text or in recent answers, or a small model's.

Without building one, ``Drafter`` finds what a suffix tree would (SuffixDecoding, arXiv 2411.04975): numpy compares the text with its
last tokens in 0.1 ms for 10,000 tokens, and keeps 4 bytes a token. Prompt lookup decoding is the case of one place (``num_places``).
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tightwire.model.runner import ModelRunner
from tightwire.server.config.limits import Limits
from tightwire.server.engine.request import Request
from tightwire.server.engine.sequences import Sequences
from tightwire.server.engine.step_builder import Chunk, StepBuilder, make_step
from tightwire.server.ipc.engine_stats import EngineCounters

_TOKEN_BYTES = array("i").itemsize
_END = -1  # of an answer, in place of a token
_LEAST_SHARE = 0.1  # of the places: a draft ends where fewer go on with its next token
_WEIGHT = 1 / 8  # of the newest observation in an average
_TRY_EVERY = 32  # tokens, after which one is drafted even if that did not pay
_MAX_ROWS = 512  # of a step whose time is kept
_MODEL_TOKENS, _MODEL_RATE = 8, 0.75  # of a model's draft: the most tokens, and the share taken to be right at first


class RowTimes:
    """The usual seconds of a step by its number of rows."""

    def __init__(self) -> None:
        self._seconds_R = np.zeros(_MAX_ROWS)

    def learn(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step. One far above the average does not spoil it."""
        if num_rows < _MAX_ROWS:
            usual = self._seconds_R[num_rows] or seconds
            self._seconds_R[num_rows] = usual + _WEIGHT * (min(seconds, 2 * usual) - usual)

    def of(self, num_rows: Any) -> np.ndarray:
        """The times of steps with so many rows: of longer ones than were measured, that of the longest; without any, next to 0."""
        known_R = np.flatnonzero(self._seconds_R)
        if not len(known_R):
            return np.full(np.shape(num_rows), 1e-9)
        return np.interp(num_rows, known_R, np.maximum.accumulate(self._seconds_R[known_R]))


@dataclass(eq=False, kw_only=True, slots=True)
class Drafter:
    """Drafts at most ``max_tokens`` that followed the last ``longest`` to ``shortest`` tokens at the last ``num_places`` places.

    ``num_recent``: so many tokens of the last answers are places too, for all requests without a cache salt. ``paced``: only as many as pay, by the times of steps; otherwise all.
    """

    max_tokens: int
    longest: int
    shortest: int
    num_places: int = 1
    num_recent: int = 0
    paced: bool = False
    _recent: bytearray = field(
        default_factory=bytearray, init=False
    )  # answers' tokens as int32, each with its ``_END``
    times: RowTimes = field(default_factory=RowTimes, init=False, repr=False)

    def prepare(self, requests: Sequence[Request], num_rows: int, num_seqs: int) -> None:
        """Called before ``draft`` with all sequences of a step that may have drafts, and what the step has without them."""

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        """At most ``room`` tokens that may follow, for a step that has ``num_rows`` of ``num_seqs`` sequences without them."""
        text, room = request.token_bytes, min(room, self.max_tokens)
        text += array("i", request.token_ids[len(text) // _TOKEN_BYTES :]).tobytes()
        if room < 1:
            return []
        if not request.draft_rates:
            request.draft_rates = [length / (length + 1) for length in range(self.longest + 1)]
        text_N, best, best_odds = np.frombuffer(text, "i4"), list[int](), list[float]()
        if self._recent and not request.cache_salt:
            text_N = np.concatenate([np.frombuffer(self._recent, "i4"), text_N])
        for length, places in self._matches(text_N):
            token_ids, shares = _follow([text_N[p + 1 : p + 1 + room].tolist() for p in places])
            rates = [request.draft_rates[min(length + i, self.longest)] for i in range(len(shares))]
            odds = np.cumprod(np.multiply(shares, rates)).tolist()
            if sum(odds) > sum(best_odds):
                best, best_odds, request.draft_basis = token_ids, odds, (length, shares)
        num_best = self.best_length(best_odds, num_rows, num_seqs) if self.paced else len(best)
        return best[: max(num_best, len(request.token_ids) % _TRY_EVERY == 0)]

    def keep(self, request: Request) -> None:
        """Let drafts of others follow this request's answer, which has ended."""
        if self.num_recent and not request.cache_salt:
            self._recent.extend(array("i", [*request.token_ids[request.num_prompt_tokens :], _END]).tobytes())
            del self._recent[: -self.num_recent * _TOKEN_BYTES]

    def learn(self, request: Request, num_drafted: int, num_right: int) -> None:
        """Record that the first ``num_right`` tokens of the last draft were right. Those behind the first wrong one were not judged."""
        (first, shares), rates = request.draft_basis, request.draft_rates
        for i, share in enumerate(shares[: min(num_drafted, num_right + 1)]):
            length = min(first + i, self.longest)
            rates[length] = min(1.0, rates[length] + _WEIGHT * ((i < num_right) - share * rates[length]))

    def time(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Record the time of a step, unless it has prompts, whose rows take another."""
        rows = Counter[int]()
        for request, start, end, _, _, draft in chunks:
            rows[request.replica] += _MAX_ROWS if start < request.num_prompt_tokens else end - start + len(draft)
        self.times.learn(max(rows.values(), default=_MAX_ROWS), seconds)

    def best_length(self, odds: ArrayLike, num_rows: int, num_seqs: int, rows_each: int = 1, draft_s: Any = 0) -> int:
        """The number of drafted tokens that makes most tokens a second; one more takes ``rows_each`` rows, and ``draft_s`` to draft."""
        tokens = num_seqs + np.cumsum(np.append(0.0, odds))
        lengths = np.arange(len(tokens))
        return int(np.argmax(tokens / (self.times.of(num_rows + rows_each * lengths) + draft_s * lengths)))

    def _matches(self, text_N: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The lengths at which the text's end occurs earlier, longest first, and where; only those that have more places than longer ones."""
        found: list[tuple[int, np.ndarray]] = []
        places = np.flatnonzero(text_N[:-1] == text_N[-1])  # of the last token
        for length in range(1, min(self.longest, len(text_N)) + 1):
            places = places[places >= length - 1]
            places = places[text_N[places - length + 1] == text_N[-length]]
            if not len(places):
                break
            if found and len(found[-1][1]) == len(places):
                found.pop()
            if length >= self.shortest:
                found.append((length, places))
        return [(length, places[-self.num_places :]) for length, places in reversed(found)]


def _follow(continuations: list[list[int]]) -> tuple[list[int], list[float]]:
    """The most frequent continuation, of equal ones the latest, with each token's share of the places that had the tokens before it."""
    token_ids, shares, share = list[int](), list[float](), 1.0
    while nexts := [each[len(token_ids)] for each in reversed(continuations) if len(each) > len(token_ids)]:
        token_id = max(dict.fromkeys(nexts), key=nexts.count)
        share *= nexts.count(token_id) / len(nexts)
        if share < _LEAST_SHARE or token_id == _END:
            break
        shares.append(nexts.count(token_id) / len(nexts))
        token_ids.append(token_id)
        continuations = [each for each in continuations if each[: len(token_ids)] == token_ids]
    return token_ids, shares


class ModelDrafter(Drafter):
    """Drafts what a small model of the same vocabulary finds most likely, on rank 0 alone, for all sequences of a step together.

    Its cache is its own. It computes what it lacks of a sequence with the first draft that pays, of prompts at most a step's tokens at
    a time, and what was wrong is overwritten.
    """

    def __init__(self, runner: ModelRunner, limits: Limits, vocab_size: int, num_replicas: int = 1) -> None:
        """``limits`` and ``vocab_size``: the target's, which may have fewer ids for padding. It has the blocks of all replicas."""
        super().__init__(max_tokens=_MODEL_TOKENS, longest=_MODEL_TOKENS - 1, shortest=0)
        self._runner, self._vocab_size = runner, vocab_size
        self._limits = Limits(
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_blocks=limits.num_blocks * num_replicas,
            block_size=limits.block_size,
        )
        self._sequences = Sequences(self._limits, EngineCounters())
        self._own: dict[Request, Request] = {}  # the sequences as its cache has them, with their last drafts
        self._drafts: dict[Request, list[int]] = {}
        self._rates, self._token_times, self._spent_s = [_MODEL_RATE] * _MODEL_TOKENS, RowTimes(), 0.0
        self._longest = 0  # draft so far

    def prepare(self, requests: Sequence[Request], num_rows: int, num_seqs: int) -> None:
        start_s, num = perf_counter(), len(requests)
        for request in [request for request, own in self._own.items() if own.epoch != request.epoch]:
            self._sequences.remove(self._own.pop(request))  # it has ended, or was preempted
        if known := self._longest:  # tokens that were never drafted are taken to be right as often as the one before
            self._rates[known:] = [self._rates[known - 1]] * (_MODEL_TOKENS - known)
        odds = num * np.cumprod(self._rates)
        length = self.best_length(odds, num_rows, num_seqs, rows_each=num, draft_s=self._token_times.of(num))
        length = max(length, any(len(request.token_ids) % _TRY_EVERY == 0 for request in requests))
        self._longest = max(self._longest, length)
        wanted = dict[Request, int]()
        for request in requests:
            # The last token of an answer is chosen, not computed.
            if (most := min(length, request.params.max_tokens - request.num_output_tokens - 1)) > 0:
                wanted[self._follow(request)] = len(request.token_ids) + most
        self._extend(wanted, length + 1)
        self._drafts = {each: own.token_ids[len(each.token_ids) :] for each, own in self._own.items() if own in wanted}
        self._spent_s += perf_counter() - start_s

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        draft = self._drafts.get(request, [])[: max(0, room)]
        request.draft_rates, request.draft_basis = self._rates, (0, [1.0] * len(draft))
        return draft

    def time(self, chunks: Iterable[Chunk], seconds: float) -> None:
        super().time(chunks, seconds - self._spent_s)
        self._spent_s = 0.0

    def _follow(self, request: Request) -> Request:
        """The draft model's sequence, with the tokens that the request has now."""
        if (own := self._own.get(request)) is None:
            given = request.id, request.params, list(request.token_ids), request.num_prompt_tokens, request.stop_ids
            own = self._own[request] = Request(*given, 0.0, cache_salt=request.cache_salt, epoch=request.epoch)
            self._sequences.running.append(own)
            self._sequences.advance(own)
        same = max(0, len(own.token_ids) - _MODEL_TOKENS)
        while own.token_ids[same : same + 1] == request.token_ids[same : same + 1] != []:
            same += 1
        own.token_ids[same:] = request.token_ids[same:]
        own.num_computed = min(own.num_computed, same)
        return own

    def _extend(self, wanted: dict[Request, int], num_steps: int) -> None:
        """Run steps until each has its wanted number of tokens. One that lacks blocks, or more than a step of its prompt, has none."""
        for number in range(num_steps):
            step = StepBuilder(self._limits, self._limits.max_num_batched_tokens)
            for own, num in wanted.items():
                num_tokens = 0 if len(own.token_ids) == num or (number and own.in_prompt) else step.affordable(own)
                if num_tokens and self._sequences.grow(own, num_tokens):
                    step.take(own, num_tokens)
            if not (chunks := step.chunks()):
                return
            start_s = perf_counter()
            logits_RV = self._runner.execute(make_step(number, chunks, self._limits).plan)
            drafted = [] if logits_RV is None else logits_RV[:, : self._vocab_size].argmax(-1).tolist()
            for chunk in chunks:
                chunk.request.num_computed = chunk.end
                self._sequences.prefixes.enter(chunk.request, chunk.end)
            for chunk, token_id in zip([chunk for chunk in chunks if chunk.samples], drafted, strict=True):
                chunk.request.token_ids.append(token_id)
            if len(drafted) == sum(chunk.num_rows for chunk in chunks):  # no step that catches up
                self._token_times.learn(len(drafted), perf_counter() - start_s)


# What ``--speculation`` names, besides ``ModelDrafter``.
DRAFTERS = {
    "ngram": partial(Drafter, max_tokens=5, longest=4, shortest=2, paced=True),
    "suffix": partial(Drafter, max_tokens=16, longest=16, shortest=1, num_places=32, paced=True),
    "suffix-shared": partial(
        Drafter, max_tokens=16, longest=16, shortest=1, num_places=32, num_recent=1 << 15, paced=True
    ),
}
