"""Logprobs in the words of both dialects."""

from collections.abc import Iterable

from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.generation import TokenEntry
from tightwire.server.api.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from tightwire.server.ipc.messages import TokenLogprob

# JSON has no -inf; a token that a mask made impossible is given this, as other servers do.
_LEAST = -9999.0


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def chat_logprobs(entries: Iterable[TokenEntry], table: TokenTable) -> ChatLogprobs:
    content = []
    for entry in entries:
        if entry.logprob is not None:
            content.append(
                ChatLogprob(
                    token=table.text_of(entry.token_id),
                    logprob=_finite(entry.logprob.logprob),
                    bytes=list(table.bytes_of(entry.token_id)),
                    top_logprobs=[_top(token_id, logprob, table) for token_id, logprob in entry.logprob.top],
                )
            )
    return ChatLogprobs(content=content)


def _top(token_id: int, logprob: float, table: TokenTable) -> TopLogprob:
    return TopLogprob(token=table.text_of(token_id), logprob=_finite(logprob), bytes=list(table.bytes_of(token_id)))


def completion_logprobs(entries: Iterable[TokenEntry], table: TokenTable) -> CompletionLogprobs:
    """Parallel lists; a first prompt token has nulls, for nothing precedes it."""
    lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in entries:
        lists.tokens.append(table.text_of(entry.token_id))
        lists.text_offset.append(entry.text_offset)
        lists.token_logprobs.append(None if entry.logprob is None else _finite(entry.logprob.logprob))
        lists.top_logprobs.append(None if entry.logprob is None else _by_text(entry.logprob, table))
    return lists


def _by_text(logprob: TokenLogprob, table: TokenTable) -> dict[str, float]:
    """The likeliest tokens, and the chosen one even when it is not among them. Of equal texts the likeliest counts."""
    texts: dict[str, float] = {}
    for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
        texts.setdefault(table.text_of(token_id), _finite(value))
    return texts


def prompt_logprobs(logprobs: list[TokenLogprob | None], table: TokenTable) -> PromptLogprobs:
    """vLLM's form: for each prompt token, the candidates by id."""
    return [None if logprob is None else _by_id(logprob, table) for logprob in logprobs]


def _by_id(logprob: TokenLogprob, table: TokenTable) -> dict[str, PromptLogprob]:
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprob.top, start=1)]
    return {
        str(token_id): PromptLogprob(logprob=_finite(value), rank=rank, decoded_token=table.text_of(token_id))
        for token_id, value, rank in [*ranked, (logprob.token_id, logprob.logprob, logprob.rank)]
    }
