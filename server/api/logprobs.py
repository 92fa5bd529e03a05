"""Formats logprobs for completions, chat completions, and vLLM's ``prompt_logprobs``."""

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import astuple

from tightwire.model.sampling.parameters import TokenScore
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.generation import TokenEntry

# JSON has no -inf; a token with zero probability gets this value, as on other servers.
_LEAST = -9999.0

NameOf = Callable[[int], str]


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    """Parallel lists; the first prompt token has nulls, because nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(entries: Iterable[TokenEntry], table: TokenTable, name_of: NameOf) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(name_of(token_id), _finite(logprob), list(table.bytes_of(token_id)))

    scored = [(entry.token_id, entry.logprob) for entry in entries if entry.logprob is not None]
    content = [
        ChatLogprob(*astuple(top(token_id, score.logprob)), top_logprobs=[top(*each) for each in score.top])
        for token_id, score in scored
    ]
    return ChatLogprobs(content)


def completion_logprobs(entries: Iterable[TokenEntry], name_of: NameOf) -> CompletionLogprobs:
    lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in entries:
        lists.tokens.append(name_of(entry.token_id))
        lists.text_offset.append(entry.text_offset)
        lists.token_logprobs.append(None if entry.logprob is None else _finite(entry.logprob.logprob))
        lists.top_logprobs.append(None if entry.logprob is None else _by_name(entry.logprob, name_of))
    return lists


def prompt_logprobs(logprobs: list[TokenScore | None], table: TokenTable) -> PromptLogprobs:
    """The candidates of each prompt token, by id."""
    return [None if logprob is None else _by_id(logprob, table) for logprob in logprobs]


def _by_name(logprob: TokenScore, name_of: NameOf) -> dict[str, float]:
    """The most likely tokens and the chosen one. Among tokens with equal names, the most likely one counts."""
    texts: dict[str, float] = {}
    for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
        texts.setdefault(name_of(token_id), _finite(value))
    return texts


def _by_id(logprob: TokenScore, table: TokenTable) -> dict[str, PromptLogprob]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top, start=1)]
    return {
        str(token_id): PromptLogprob(logprob=_finite(value), rank=rank, decoded_token=table.text_of(token_id))
        for token_id, value, rank in [*ranked, (logprob.token_id, logprob.logprob, logprob.rank)]
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
