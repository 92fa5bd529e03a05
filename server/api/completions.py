"""The completions dialect: prompts as text or ids, deltas to ``text_completion`` bodies and chunks."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from tightwire.server.api.answer import Heading
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.generation import Delta, Sequence
from tightwire.server.api.prompts import check_count, check_ids, make_sequences, off_loop
from tightwire.server.api.responses import Completion, CompletionChoice, CompletionLogprobs, TightwireExtra, Usage
from tightwire.server.api.schemas import CompletionBody
from tightwire.server.api.served_model import ServedModel
from tightwire.server.api.token_text import completion_logprobs, prompt_logprobs

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completion_sequences(body: CompletionBody, model: ServedModel, max_sequences: int) -> list[Sequence]:
    check_count(len(body.prompt), body.n, max_sequences)
    num_chars = sum(len(prompt) for prompt in body.prompt)
    prompts, echoes = await off_loop(lambda: _tokenize(body, model), num_chars)
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
    """Each prompt's ids, and its text when it is to be echoed."""
    tokenizer = model.tokenizer
    if isinstance(body.prompt[0], str):
        ids = [tokenizer.encode(prompt, body.add_special_tokens) for prompt in body.prompt]
        return ids, body.prompt if body.echo else None
    for prompt in body.prompt:
        check_ids(prompt, model.info, "prompt")
    return body.prompt, [tokenizer.decode(prompt) for prompt in body.prompt] if body.echo else None


class CompletionDialect:
    """A stream's last chunk of each choice has no text, only the finish reason."""

    def __init__(self, body: CompletionBody, heading: Heading, tokens: TokenTable) -> None:
        self._heading = heading
        self._tokens = tokens
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._usage: None | UnsetType = None if body.stream_options and body.stream_options.include_usage else UNSET

    def chunks(self, delta: Delta) -> Iterator[Completion]:
        logprobs = self._logprobs_of(delta)
        if delta.text:
            yield self._body([CompletionChoice(delta.index, delta.text, logprobs)], self._usage)
            logprobs = None
        if delta.finish_reason is not None:
            yield self._body([CompletionChoice(delta.index, "", logprobs, delta.finish_reason)], self._usage)

    def last_chunk(self, usage: Usage | None, extra: TightwireExtra | UnsetType) -> Completion:
        return self._body([], usage or self._usage, extra)

    def whole(self, choices: list[Delta], usage: Usage, extra: TightwireExtra | UnsetType) -> Completion:
        return self._body([self._choice(choice) for choice in choices], usage, extra)

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

    def _body(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        extra: TightwireExtra | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self._heading.id,
            created=self._heading.created,
            model=self._heading.model,
            system_fingerprint=self._heading.system_fingerprint,
            choices=choices,
            usage=usage,
            tightwire=extra,
        )
