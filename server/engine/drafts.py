"""Drafts what most often followed the last tokens earlier in the sequence's own text, and by choice in recent answers.

It drafts what a suffix tree would (SuffixDecoding, arXiv 2411.04975) without building one: numpy compares the text with its last
tokens in 0.1 ms for 10,000 tokens, and keeps 4 bytes a token. Prompt lookup decoding is the case of one place (``num_places``).
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tightwire.server.engine.request import Request
from tightwire.server.engine.step_builder import Chunk

_TOKEN_BYTES = array("i").itemsize
_END = -1  # of an answer, in place of a token
_LEAST_SHARE = 0.1  # of the places: a draft ends where fewer go on with its next token
_WEIGHT = 1 / 8  # of the newest observation in an average
_TRY_EVERY = 32  # tokens, after which one is drafted even if that did not pay
_MAX_ROWS = 512  # of a step whose time is kept


@dataclass(frozen=True, kw_only=True, slots=True)
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
    _seconds_R: np.ndarray = field(default_factory=lambda: np.zeros(_MAX_ROWS), init=False)  # of steps with R rows
    _recent: bytearray = field(
        default_factory=bytearray, init=False
    )  # tokens of answers as int32, each with its ``_END``

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
        num_best = self._best_length(best_odds, num_rows, num_seqs) if self.paced else len(best)
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
        """Record the time of a step. Prompts' rows take another, and one step far above the average does not spoil it."""
        rows = Counter[int]()
        for request, start, end, _, _, draft in chunks:
            rows[request.replica] += _MAX_ROWS if start < request.num_prompt_tokens else end - start + len(draft)
        if (num_rows := max(rows.values(), default=_MAX_ROWS)) < _MAX_ROWS:
            usual = self._seconds_R[num_rows] or seconds
            self._seconds_R[num_rows] = usual + _WEIGHT * (min(seconds, 2 * usual) - usual)

    def _best_length(self, odds: list[float], num_rows: int, num_seqs: int) -> int:
        """The number of drafted tokens that makes most tokens a second. Unmeasured longer steps count as the longest measured one."""
        known_R = np.flatnonzero(self._seconds_R)
        if not len(known_R):
            return len(odds)
        rising_R = np.maximum.accumulate(self._seconds_R[known_R])
        seconds = np.interp(np.arange(num_rows, num_rows + len(odds) + 1), known_R, rising_R)
        return int(np.argmax((num_seqs + np.cumsum([0.0, *odds])) / seconds))

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


# What ``--speculation`` names.
DRAFTERS = {
    "ngram": partial(Drafter, max_tokens=5, longest=4, shortest=2, paced=True),
    "suffix": partial(Drafter, max_tokens=16, longest=16, shortest=1, num_places=32, paced=True),
    "suffix-shared": partial(
        Drafter, max_tokens=16, longest=16, shortest=1, num_places=32, num_recent=1 << 15, paced=True
    ),
}
