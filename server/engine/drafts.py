"""Drafts the tokens that most often followed the last ones earlier in the text or in recent answers, as many as pay.

Without building one, ``Drafter`` finds what a suffix tree would (SuffixDecoding, arXiv 2411.04975): numpy compares the text with its
last tokens in 0.1 ms for 10,000 tokens, and keeps 4 bytes a token. Prompt lookup decoding is the case of one place (``num_places``).
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.server.engine.request import Request
from tightwire.server.engine.step_builder import Chunk

_TOKEN_BYTES = array("i").itemsize
_END = -1  # of an answer, in place of a token
_LEAST_SHARE = 0.1  # of the places: a draft ends where fewer go on with its next token
WEIGHT = 1 / 8  # of the newest observation in an average
_TRY_EVERY = 32  # tokens, after which one is drafted even if that did not pay
_MAX_ROWS = 512  # of a step whose time is kept
_KEPT_STEPS = 128  # the last ones, whose times are known


class RowTimes:
    """The usual seconds of a step by its number of rows; those not seen for many steps are forgotten, and so tried again."""

    def __init__(self) -> None:
        self._seconds_R, self._seen_R, self._num_seen = np.zeros(_MAX_ROWS), np.zeros(_MAX_ROWS, int), 0

    def learn(self, num_rows: int, seconds: float) -> None:
        """Record the time of a step. One far above what was expected does not spoil it, and one below soon counts."""
        if num_rows < _MAX_ROWS:
            if usual := float(self._seconds_R[num_rows]):
                weight = WEIGHT if seconds > usual else 1 / 2
            else:  # the first step of so many rows
                usual, weight = float(self.of(num_rows)) if self._num_seen else seconds, 1
            self._seconds_R[num_rows] = usual + weight * (min(seconds, 2 * usual) - usual)
            self._num_seen += 1
            self._seen_R[num_rows] = self._num_seen

    def of(self, num_rows: Any) -> np.ndarray:
        """The times of steps with so many rows, of unmeasured ones on a line through others; without any, next to 0."""
        known_R = np.flatnonzero(self._seen_R > max(0, self._num_seen - _KEPT_STEPS))
        if not len(known_R):
            return np.full(np.shape(num_rows), 1e-9)
        seconds_R = np.maximum.accumulate(self._seconds_R[known_R])
        more = (seconds_R[-1] - seconds_R[0]) / max(1, known_R[-1] - known_R[0])
        return np.interp(num_rows, known_R, seconds_R) + more * np.maximum(0, np.subtract(num_rows, known_R[-1]))


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
    grammars: GrammarMasks | None = None  # that drafts follow too
    # Answers' tokens as int32, each with its ``_END``.
    _recent: bytearray = field(default_factory=bytearray, init=False)
    _expected: float = field(default=0.0, init=False)  # right tokens of the step's drafts so far
    times: RowTimes = field(default_factory=RowTimes, init=False, repr=False)

    def prepare(self, requests: Sequence[Request], num_rows: int, num_seqs: int) -> None:
        """Called before ``draft`` with all sequences of a step that may have drafts, and what the step has without them."""
        self._expected = 0.0

    def draft(self, request: Request, room: int, num_rows: int = 1, num_seqs: int = 1) -> list[int]:
        """At most ``room`` tokens, for a step that has ``num_rows`` of ``num_seqs`` sequences, the others' drafts included."""
        best, odds = self.search(request, min(room, self.max_tokens))
        num_best = self.best_length(odds, num_rows, num_seqs + self._expected) if self.paced else len(best)
        num_best = max(num_best, len(request.token_ids) % _TRY_EVERY == 0)
        self._expected += sum(odds[:num_best])
        return best[:num_best]

    def search(self, request: Request, room: int, ahead: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """The best tokens behind the text and ``ahead``, and the odds that each of them is right with those before it."""
        text, best, best_odds = request.token_bytes, list[int](), list[float]()
        text += array("i", request.token_ids[len(text) // _TOKEN_BYTES :]).tobytes()
        request.draft_basis = (0, [])
        if room < 1:
            return best, best_odds
        if not request.draft_rates:
            request.draft_rates = [length / (length + 3) for length in range(self.longest + 1)]
        text_N = np.frombuffer(text + array("i", ahead).tobytes(), "i4")
        if self._recent and not request.cache_salt:
            text_N = np.concatenate([np.frombuffer(self._recent, "i4"), text_N])
        for length, places in self._matches(text_N):
            token_ids, shares = _follow([text_N[p + 1 : p + 1 + room].tolist() for p in places], request.stop_ids)
            rates = [request.draft_rates[min(length + i, self.longest)] for i in range(len(shares))]
            odds = np.cumprod(np.multiply(shares, rates)).tolist()
            if sum(odds) > sum(best_odds):
                best, best_odds, request.draft_basis = token_ids, odds, (length, shares)
        num_allowed = len(best)
        if best and request.params.grammar and self.grammars is not None:
            banned = self.grammars.banned(request, [*ahead, *best])[len(ahead) :]
            num_allowed = next((i for i, token_id in enumerate(best) if banned[i][token_id]), num_allowed)
        return best[:num_allowed], best_odds[:num_allowed]

    def keep(self, request: Request) -> None:
        """Let drafts of others follow this request's answer, which has ended."""
        if self.num_recent and not request.cache_salt:
            self._recent.extend(array("i", [*request.token_ids[request.num_prompt_tokens :], _END]).tobytes())
            del self._recent[: -self.num_recent * _TOKEN_BYTES]

    def learn(self, request: Request, num_drafted: int, num_right: int, chosen: Sequence[int]) -> None:
        """Record that the first ``num_right`` tokens of the last draft were right, those behind the next one of ``chosen`` not judged."""
        (first, shares), rates = request.draft_basis, request.draft_rates
        for i, share in enumerate(shares[: min(num_drafted, num_right + 1)]):
            length = min(first + i, self.longest)
            rates[length] = min(1.0, rates[length] + WEIGHT * ((i < num_right) - share * rates[length]))

    def time(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """Record the time of a step, unless it has prompts, whose rows take another."""
        rows = Counter[int]()
        for request, start, end, _, _, draft in chunks:
            rows[request.replica] += _MAX_ROWS if start < request.num_prompt_tokens else end - start + len(draft)
        self.times.learn(max(rows.values(), default=_MAX_ROWS), seconds)

    def best_length(self, odds: ArrayLike, num_rows: int, num_tokens: float, spent_s: float = 0.0) -> int:
        """The number of drafted tokens that makes most tokens a second, in a step that took ``spent_s`` before it begins."""
        tokens = num_tokens + np.cumsum(np.append(0.0, odds))
        return int(np.argmax(tokens / (self.times.of(num_rows + np.arange(len(tokens))) + spent_s)))

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


def _follow(continuations: list[list[int]], stop_ids: frozenset[int]) -> tuple[list[int], list[float]]:
    """The most frequent continuation, of equal ones the latest, up to a stop token, with each token's share of the places that had the tokens before it."""
    token_ids, shares, share = list[int](), list[float](), 1.0
    while nexts := [each[len(token_ids)] for each in reversed(continuations) if len(each) > len(token_ids)]:
        token_id = max(dict.fromkeys(nexts), key=nexts.count)
        share *= nexts.count(token_id) / len(nexts)
        if share < _LEAST_SHARE or token_id == _END:
            break
        shares.append(nexts.count(token_id) / len(nexts))
        token_ids.append(token_id)
        continuations = [each for each in continuations if each[: len(token_ids)] == token_ids]
        if token_id in stop_ids:
            break
    return token_ids, shares


SUFFIX: dict[str, Any] = {"max_tokens": 16, "longest": 16, "shortest": 1, "num_places": 32, "paced": True}
# What ``--speculation`` names, besides ``ModelDrafter``.
DRAFTERS = {
    "ngram": partial(Drafter, max_tokens=5, longest=4, shortest=2, paced=True),
    "suffix": partial(Drafter, **SUFFIX),
    "suffix-shared": partial(Drafter, **SUFFIX, num_recent=1 << 15),
}
