"""Sampling parameters of one sequence.

To add a parameter, add a field to the request body (``server/api/schemas``), a field of the same name here, and its
effect to the sampler. The body's field is copied by name.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Protocol, get_type_hints

import msgspec


class Needs(enum.Enum):
    """The input that a parameter needs if it differs from its default."""

    BEST_LOGITS = "the logits of the tokens that may be drawn"
    ALL_LOGITS = "all logits: it may change which are the best, or it reports on all of them"
    TOKENS = "all logits, and on the host every token so far, so no step is planned ahead of it"


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
        places: set[int] = set()
        for token_id in token_ids:
            places = {self.steps[p][token_id] for p in (*self.starts, *places) if token_id in self.steps[p]}
        return self._ends(places)

    @property
    def whole(self) -> list[int]:
        """The tokens that are the whole text."""
        return self._ends(self.starts)

    def _ends(self, places: Iterable[int]) -> list[int]:
        return [token_id for p in places for token_id, after in self.steps[p].items() if after == len(self.steps)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's parameters and vLLM's extensions. Each field declares what it needs (``Needs``).

    ``temperature`` 0 is greedy. ``top_k`` 0 keeps all tokens. ``seed`` is set by the time a request reaches the engine.
    """

    max_tokens: Annotated[int, Needs.BEST_LOGITS]
    temperature: Annotated[float, Needs.BEST_LOGITS] = 1.0
    top_p: Annotated[float, Needs.BEST_LOGITS] = 1.0
    top_k: Annotated[int, Needs.BEST_LOGITS] = 0
    min_p: Annotated[float, Needs.BEST_LOGITS] = 0.0
    seed: Annotated[int, Needs.BEST_LOGITS] = 0
    presence_penalty: Annotated[float, Needs.TOKENS] = 0.0
    frequency_penalty: Annotated[float, Needs.TOKENS] = 0.0
    repetition_penalty: Annotated[float, Needs.TOKENS] = 1.0
    logit_bias: Annotated[dict[int, float], Needs.ALL_LOGITS] = {}
    # Number of most likely tokens to report for each chosen token; None: no logprobs.
    logprobs: Annotated[int | None, Needs.ALL_LOGITS] = None
    # The same for the prompt's tokens, which are scored from separate logits (``Chunk.scored``).
    prompt_logprobs: Annotated[int | None, Needs.BEST_LOGITS] = None
    # The engine adds the model's end tokens, unless ignore_eos.
    stop_token_ids: Annotated[tuple[int, ...], Needs.BEST_LOGITS] = ()
    min_tokens: Annotated[int, Needs.ALL_LOGITS] = 0  # stop tokens are banned before this many tokens
    ignore_eos: Annotated[bool, Needs.BEST_LOGITS] = False
    # All others are banned; None: all are allowed.
    allowed_token_ids: Annotated[tuple[int, ...] | None, Needs.ALL_LOGITS] = None
    bad_words: Annotated[tuple[BannedText, ...], Needs.TOKENS] = ()
    # The text of an llguidance grammar that the output follows; empty: none.
    grammar: Annotated[str, Needs.TOKENS] = ""

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is chosen, for any seed."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_all_logits(self) -> bool:
        return _any_set(self, _NEED_ALL_LOGITS)

    @property
    def needs_tokens(self) -> bool:
        return _any_set(self, _NEED_TOKENS)


class SamplingRow(Protocol):
    """The fields of a sequence that the sampler reads. Rows are compared by identity."""

    params: SamplingParams
    stop_ids: frozenset[int]  # banned until min_tokens tokens are generated
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int


# As in vLLM: below this temperature only the largest float32 logit keeps a nonzero probability.
_GREEDY_BELOW = 1e-5


def declared_needs(kind: type[msgspec.Struct]) -> dict[str, Needs | None]:
    """Return each field's declaration; None, for a field without one, counts as ``Needs.TOKENS``."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: next((mark for mark in getattr(hints[name], "__metadata__", ()) if isinstance(mark, Needs)), None)
        for name in kind.__struct_fields__
    }


_DEFAULTS = SamplingParams(max_tokens=0)
_NEEDS = declared_needs(SamplingParams)
_NEED_ALL_LOGITS = [name for name, needs in _NEEDS.items() if needs is not Needs.BEST_LOGITS]
_NEED_TOKENS = [name for name in _NEED_ALL_LOGITS if _NEEDS[name] is not Needs.ALL_LOGITS]


def _any_set(params: SamplingParams, names: list[str]) -> bool:
    return any(getattr(params, name) != getattr(_DEFAULTS, name) for name in names)
