"""POST /v1/completions: text or token prompts, deltas to ``text_completion`` bodies and chunks."""

from msgspec import UNSET, Struct, UnsetType

from tightwire.server.api.answer import Dialect, HeadedBody
from tightwire.server.api.generation import Delta, Prompt
from tightwire.server.api.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs
from tightwire.server.api.prompts import check_ids, run_off_loop
from tightwire.server.api.request_bodies import CompletionBody
from tightwire.server.api.response_bodies import Usage
from tightwire.server.api.trace import Extra

Logprobs = CompletionLogprobs | None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: Logprobs = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(HeadedBody):
    """The whole answer, and each chunk of a stream."""

    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    tightwire: Extra = UNSET


class CompletionDialect(Dialect[CompletionBody]):
    """A choice's last chunk has no text, only the finish reason."""

    body_type, whole_type, chunk_type, id_prefix = CompletionBody, Completion, Completion, "cmpl-"

    async def prompts(self) -> list[Prompt]:
        given = self.body.prompt
        return await run_off_loop(lambda: list(map(self._prompt, given)), sum(map(len, given)))

    def _prompt(self, given: str | list[int]) -> Prompt:
        tokenizer = self.model.tokenizer
        if isinstance(given, str):
            ids = tokenizer.encode(given, self.body.add_special_tokens)
            return Prompt(ids, given if self.body.echo else None, True)
        check_ids(given, self.model.info, "prompt")
        return Prompt(given, tokenizer.decode(given, self.body.skip_special_tokens) if self.body.echo else None, True)

    def piece(self, index: int, text: str, logprobs: Logprobs, finish_reason: str | None = None) -> CompletionChoice:
        return CompletionChoice(index, text, logprobs, finish_reason)

    def choice(self, delta: Delta, logprobs: Logprobs, of_prompt: PromptLogprobs | UnsetType) -> CompletionChoice:
        ids = delta.token_ids if self.body.return_token_ids else UNSET
        return CompletionChoice(delta.index, delta.text, logprobs, delta.finish_reason, of_prompt, ids)

    def logprobs(self, delta: Delta) -> CompletionLogprobs:
        return completion_logprobs(delta.entries, self.name_of)
