"""Implements POST /v1/completions: text or token prompts, deltas to ``text_completion`` bodies and chunks."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType

from tightwire.server.api.answer import HeadedBody, Heading
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.generation import Delta, Sequence
from tightwire.server.api.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs
from tightwire.server.api.prompts import check_count, check_ids, make_sequences, run_off_loop
from tightwire.server.api.responses import Usage
from tightwire.server.api.schemas import CompletionBody
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.trace import TightwireExtra

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(HeadedBody):
    """The whole answer, and each chunk of a stream."""

    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    tightwire: TightwireExtra | UnsetType = UNSET


async def completion_sequences(body: CompletionBody, model: ServedModel, max_sequences: int) -> list[Sequence]:
    check_count(len(body.prompt), body.n, max_sequences)
    num_chars = sum(len(prompt) for prompt in body.prompt)
    prompts, echoes = await run_off_loop(lambda: _tokenize(body, model), num_chars)
    return make_sequences(
        body,
        model,
        prompts,
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        echoes=echoes,
        after_text=True,
    )


def _tokenize(body: CompletionBody, model: ServedModel) -> tuple[list[list[int]], list[str | None] | None]:
    """The token ids of each prompt; with ``echo`` also their texts."""
    tokenizer = model.tokenizer
    if isinstance(body.prompt[0], str):
        ids = [tokenizer.encode(prompt, body.add_special_tokens) for prompt in body.prompt]
        return ids, body.prompt if body.echo else None
    for prompt in body.prompt:
        check_ids(prompt, model.info, "prompt")
    return body.prompt, [tokenizer.decode(prompt) for prompt in body.prompt] if body.echo else None


class CompletionDialect:
    """Makes completion bodies and chunks. A choice's last chunk has no text, only the finish reason."""

    def __init__(self, body: CompletionBody, heading: Heading, tokens: TokenTable) -> None:
        self._heading, self._tokens = heading, tokens
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._usage: None | UnsetType = None if body.stream_options and body.stream_options.include_usage else UNSET

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        logprobs = self._logprobs_of(delta)
        if delta.text:
            yield self._chunk(CompletionChoice(delta.index, delta.text, logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            yield self._chunk(CompletionChoice(delta.index, "", logprobs, delta.finish_reason))

    def last_chunk(self, usage: Usage | None, extra: TightwireExtra | UnsetType) -> Completion:
        return Completion(**self._heading, choices=[], usage=usage or self._usage, tightwire=extra)

    def whole(self, choices: list[Delta], usage: Usage, extra: TightwireExtra | UnsetType) -> Completion:
        return Completion(**self._heading, choices=list(map(self._choice, choices)), usage=usage, tightwire=extra)

    def _choice(self, choice: Delta) -> CompletionChoice:
        of_prompt = choice.prompt_logprobs if self._prompt_logprobs else None
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=self._logprobs_of(choice),
            finish_reason=choice.finish_reason,
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(of_prompt, self._tokens),
        )

    def _logprobs_of(self, delta: Delta) -> CompletionLogprobs | None:
        return completion_logprobs(delta.entries, self._tokens) if self._logprobs and delta.entries else None

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(**self._heading, choices=[choice], usage=self._usage)
