"""Guesses of a sequence's next tokens, out of its own text: what followed when its last tokens stood there before.

Prompt lookup: answers that quote (summaries, code edits, extraction) repeat stretches of their prompt. A guess is free to be
wrong: the model computes all guessed tokens in one step, and only those that it would have chosen itself stay.

Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding.
"""

from array import array
from dataclasses import dataclass

from tightwire.server.engine.request import Request

_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramDrafter:
    """``max_tokens`` at most are guessed after the longest of the last ``longest`` to ``shortest`` tokens that recur."""

    max_tokens: int
    longest: int
    shortest: int

    def draft(self, request: Request, room: int) -> list[int]:
        """What may follow ``request``'s tokens, at most ``room``; often nothing.

        A sequence whose guesses fail gets shorter ones, until they hold again.

        Cost: some ten microseconds for a context of 10 000 tokens.
        """
        text = request.token_bytes
        text += array("i", request.token_ids[len(text) // _TOKEN_BYTES :]).tobytes()
        room = min(room, self.max_tokens, request.draft_limit or self.max_tokens)
        if room < 1:
            return []
        for length in range(min(self.longest, len(request.token_ids) - 1), self.shortest - 1, -1):
            start = _last_place(text, length * _TOKEN_BYTES)
            if start >= 0:
                first = start + length * _TOKEN_BYTES
                return array("i", bytes(text[first : first + room * _TOKEN_BYTES])).tolist()
        return []

    def learn(self, request: Request, num_right: int) -> None:
        """The first ``num_right`` tokens of the last draft held."""
        request.draft_limit = min(self.max_tokens, 2 * num_right + 1)


def _last_place(text: bytearray, num_bytes: int) -> int:
    """Where the last ``num_bytes`` of ``text`` stand for the last time before, or minus one."""
    tail, end = text[-num_bytes:], len(text) - 1
    while True:
        place = text.rfind(tail, 0, end)
        if place % _TOKEN_BYTES == 0 or place < 0:
            return place
        end = place + num_bytes - 1  # across tokens: no place at all
