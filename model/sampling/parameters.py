"""Sampling parameters of one sequence.

A new parameter such as ``min_p`` touches four files: ``server/api/request_bodies`` (a field of the body), this one (a field of
the same name; the body's is copied), ``rows`` (a column, and ``sampled_row``, which fills it) and ``choose`` (its effect).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec


class TokenScore(NamedTuple):
    """A token's natural-log probability before temperature and penalties, with the most likely tokens at its position.

    ``rank`` counts from 1 in the order of ``top``: by probability, then by token id.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class BannedText(msgspec.Struct, frozen=True, array_like=True):
    """A text that the output may not contain, as every sequence of tokens that spells it."""

    steps: tuple[dict[int, int], ...]  # at each byte of the text: the tokens that fit, and the place after each
    starts: tuple[int, ...] = (0,)  # the places where a spelling may begin

    def ends_after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would complete the text after the last of ``token_ids``."""
        places, end = set[int](), len(self.steps)  # a draft may have the whole text, and goes on from no place then
        for token_id in token_ids:
            found = {self.steps[place].get(token_id, end) for place in (*self.starts, *places)}
            places = {place for place in found if place < end}
        return self._ends(places)

    @property
    def whole(self) -> list[int]:
        """The tokens that are the whole text."""
        return self._ends(self.starts)

    def _ends(self, places: Iterable[int]) -> list[int]:
        end = len(self.steps)
        return [token_id for place in places for token_id, after in self.steps[place].items() if after == end]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's parameters and vLLM's extensions.

    ``temperature`` 0 is greedy. ``top_k`` 0 keeps all tokens. ``seed`` is set by the time a request reaches the engine.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # how many most likely tokens to report for each chosen token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, by logits of their own (``Chunk.scored``)
    stop_token_ids: tuple[int, ...] = ()  # the engine adds the model's end tokens, unless ignore_eos
    min_tokens: int = 0  # stop tokens are banned before this many tokens
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None  # all others are banned; None: all are allowed
    bad_words: tuple[BannedText, ...] = ()
    grammar: str = ""  # the text of an llguidance grammar that the output follows; empty: none

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def has_mask(self) -> bool:
        """True if which tokens are banned is sent as a bit for each token of the vocabulary."""
        return bool(self.grammar or self.bad_words or self.allowed_token_ids is not None)

    @property
    def needs_tokens(self) -> bool:
        """True if every token so far must be on the host, so that no step is planned ahead of it."""
        return bool(self.has_penalties or self.bad_words or self.grammar)


class SamplingRow(Protocol):
    """The fields of a sequence that the sampler reads. Rows are compared by identity."""

    params: SamplingParams
    stop_ids: frozenset[int]  # banned until min_tokens tokens are generated
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int


GREEDY_BELOW = 1e-5  # as in vLLM: at a lower temperature only the largest float32 logit keeps a probability above 0
