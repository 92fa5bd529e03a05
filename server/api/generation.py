"""Submits a request's sequences to the engine and turns tokens into text, for all dialects. Knows no JSON or HTTP."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from msgspec import structs

from tightwire.model.sampling.parameters import SamplingParams, TokenScore
from tightwire.server.api.detokenize import Detokenizer, StopStrings, TokenTable
from tightwire.server.api.errors import ApiError, invalid, unavailable
from tightwire.server.api.request_bodies import GenerationBody
from tightwire.server.api.trace import RequestTrace
from tightwire.server.ipc.engine_client import EngineClient, EngineUnavailableError, QueueFullError
from tightwire.server.ipc.messages import AddRequest, Output, PromptProgress

_FAILED = ("error", "cancelled", "refused")


class TokenEntry(NamedTuple):
    """One token of the answer (or of the echoed prompt), for logprobs."""

    token_id: int
    text_offset: int  # where its text begins in the choice's text
    logprob: TokenScore | None


@dataclass(slots=True)
class Delta:
    """New text and tokens of one choice, or only ``progress``. The last delta of a choice has ``finish_reason``."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    prompt_logprobs: list[TokenScore | None] | None = None
    finish_reason: str | None = None
    stop_string: str | None = None  # the one that ended it
    token_ids: list[int] = field(default_factory=list)  # of the choice so far
    progress: PromptProgress | None = None

    def append(self, later: "Delta") -> None:
        self.text += later.text
        self.entries += later.entries
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_string, self.token_ids = later.finish_reason, later.stop_string, later.token_ids


class Prompt(NamedTuple):
    """A prompt's tokens. ``echo``: its text, if the answer begins with it. ``after_text``: the answer continues its text."""

    token_ids: list[int]
    echo: str | None = None
    after_text: bool = False


class TokenSequence:
    """One choice of an answer. Detokenizes its tokens and finds stop strings; call ``take`` with each output in order."""

    def __init__(
        self, index: int, prompt: Prompt, params: SamplingParams, body: GenerationBody, tokens: TokenTable
    ) -> None:
        self.index, self.prompt, self.params = index, prompt, params
        self.token_ids: list[int] = []  # of the answer, including the token that ended it
        self.num_cached_tokens = 0  # prompt tokens that the engine did not compute
        self.finished = False
        self._body, self._tokens = body, tokens
        # If not, only the prompt is scored; the engine generates one token anyway.
        self._wants_tokens = body.token_limit != 0
        self._detokenizer = Detokenizer(
            tokens, after_text=prompt.after_text, skip_special=body.skip_special_tokens, with_calls=body.may_call_tools
        )
        self._stops = StopStrings(body.stop, include=body.include_stop_str_in_output)
        self._text_start = len(prompt.echo or "")
        self._started = False
        self._delta = Delta(index, token_ids=self.token_ids)

    def take(self, output: Output) -> Delta | None:
        """What becomes final with this output, if anything. Raises ApiError if the engine ended it with an error."""
        if output.finish_reason in _FAILED:
            self.finished = True
            raise _make_error(output)
        if not self._started:
            self._start(output)
        if self._wants_tokens:
            self._take_tokens(output)
        if output.finish_reason is not None and not self.finished:
            self._finish(output.finish_reason if self._wants_tokens else "length")
        return self._release()

    def _start(self, output: Output) -> None:
        self._started = True
        self.num_cached_tokens = output.num_cached_tokens
        self._delta.prompt_logprobs = output.prompt_logprobs
        if self.prompt.echo is not None:
            self._delta.text = self.prompt.echo
            self._delta.entries = self._prompt_entries(self.prompt.echo, output.prompt_logprobs)

    def _prompt_entries(self, echo: str, logprobs: list[TokenScore | None] | None) -> list[TokenEntry]:
        detokenizer, entries, num_special_chars = Detokenizer(self._tokens), [], 0
        for position, token_id in enumerate(self.prompt.token_ids):
            offset = min(detokenizer.num_chars + num_special_chars, len(echo))
            entries.append(TokenEntry(token_id, offset, logprobs[position] if logprobs else None))
            detokenizer.push(token_id)
            # A special token has text where the prompt names it, and none where the tokenizer added it.
            if token_id in self._tokens.special and echo.startswith(name := self._tokens.text_of(token_id), offset):
                num_special_chars += len(name)
        return entries

    def _take_tokens(self, output: Output) -> None:
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            logprob = output.logprobs[position] if output.logprobs else None
            self._delta.entries.append(TokenEntry(token_id, self._text_start + self._detokenizer.num_chars, logprob))
            ends = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if ends and not self._body.include_stop_str_in_output:
                return
            self._add_text(self._detokenizer.push(token_id))
            if self.finished:
                return

    def _add_text(self, text: str) -> None:
        # Stop strings do not count within the first min_tokens tokens.
        if len(self.token_ids) > self.params.min_tokens:
            text = self._stops.push(text)
        self._delta.text += text
        if self._stops.hit is not None:
            self.finished = True
            self._delta.finish_reason, self._delta.stop_string = "stop", self._stops.hit

    def _finish(self, reason: str) -> None:
        self._add_text(self._detokenizer.flush())
        if not self.finished:
            self.finished = True
            self._delta.text += self._stops.flush()
            self._delta.finish_reason = reason

    def _release(self) -> Delta | None:
        """Hold logprobs back until their text is final, so that they never reveal more than the text does."""
        if not self._delta.text and not self.finished:
            return None
        delta, self._delta = self._delta, Delta(self.index, token_ids=self.token_ids)
        return delta


def _make_error(output: Output) -> ApiError:
    if output.finish_reason == "cancelled":
        return unavailable(output.message or "the server ended this request before it was finished")
    if output.finish_reason == "refused":
        return invalid(output.message or "the engine refused this request", code="refused")
    return ApiError(500, f"the engine ended this request: {output.message or 'no reason given'}", code="engine_error")


class _SharedScores:
    """Gives each choice the scores of its prompt, which only the first one asks for. Outputs wait for them."""

    def __init__(self, sequences: Iterable[TokenSequence], n: int) -> None:
        self._n, self._wanted = n, n > 1 and any(each.params.prompt_logprobs is not None for each in sequences)
        self._scores: dict[int, list[TokenScore | None]] = {}
        self._held: dict[int, list[Output]] = {}

    def release(self, output: Output, index: int) -> list[Output]:
        """The outputs that need not wait any more. ``index``: of this one's sequence."""
        if not self._wanted or output.finish_reason in _FAILED:
            return [output]
        if output.prompt_logprobs is not None:
            self._scores[index // self._n] = output.prompt_logprobs
        held = [*self._held.pop(index // self._n, ()), output]
        if (scores := self._scores.get(index // self._n)) is None:
            self._held[index // self._n] = held
            return []
        return [structs.replace(each, prompt_logprobs=scores) for each in held]


async def generate(
    engine: EngineClient,
    sequences: Mapping[str, TokenSequence],
    trace: RequestTrace,
    body: GenerationBody,
    policy: str | None,
    take_adapter: Callable[[], int],
) -> AsyncGenerator[Delta, None]:
    """Run these sequences (by engine id) and yield new deltas, interleaved, until all are finished.

    Closing the generator early cancels the sequences that still run. QueueFullError, EngineUnavailableError: nothing
    was started, or the engine died meanwhile. ApiError: the engine ended a sequence with an error.
    """
    running, accepted, scores = dict(sequences), False, _SharedScores(sequences.values(), body.n)
    outcome = "cancelled"  # of sequences that still run at the end: the client disconnected, unless there was an error
    others = policy, body.cache_salt or "", take_adapter(), body.stream and body.tightwire.progress
    requests = [AddRequest(id_, s.prompt.token_ids, s.params, *others) for id_, s in sequences.items()]
    trace.submitted(sequences)
    try:
        # Implementations are async generators; ``EngineClient`` promises their aclose.
        async with aclosing(cast(AsyncGenerator[Output, None], engine.submit(requests))) as outputs:
            async for arrived in outputs:
                accepted = True
                if arrived.progress is not None:
                    yield Delta(sequences[arrived.id].index, progress=arrived.progress)
                    continue
                for output in scores.release(arrived, sequences[arrived.id].index):
                    if (sequence := running.get(output.id)) is None:
                        continue  # a stop string has already ended it
                    trace.saw(output)
                    if (delta := sequence.take(output)) is None:
                        continue
                    if delta.finish_reason is not None:
                        del running[output.id]
                        trace.ended(output.id, delta.finish_reason)
                        if output.finish_reason is None:
                            engine.cancel([output.id])
                    yield delta
                    if not running:
                        return
        raise ApiError(500, "the engine ended the stream without a finish reason", code="engine_error")
    except Exception as error:
        refused = isinstance(error, QueueFullError | EngineUnavailableError) and not accepted
        outcome = "refused" if refused else "error"
        raise
    finally:
        for id_ in running:
            trace.ended(id_, outcome)
