"""From the engine's tokens to text: the sequences of one request, followed until each has its finish reason.

Both dialects stand on ``generate``. Knows neither JSON nor HTTP.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.api.detokenize import Detokenizer, TokenTable
from tightwire.server.api.errors import ApiError, unavailable
from tightwire.server.api.metrics import SequenceTimer
from tightwire.server.api.stop_strings import StopStrings
from tightwire.server.api.ttft import TtftWatch
from tightwire.server.ipc.engine_client import EngineClient, EngineUnavailableError, QueueFullError
from tightwire.server.ipc.messages import AddRequest, Output, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of the answer (or of the echoed prompt), for logprobs."""

    token_id: int
    text_offset: int  # where its text begins in the choice's text
    logprob: TokenLogprob | None


@dataclass(slots=True)
class Delta:
    """What is new of one choice. The last delta of a choice has ``finish_reason``."""

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None


class Sequence:
    """One choice: detokenizes, watches for stop strings, counts. ``take`` each of its outputs in turn.

    Args:
        echo: the prompt's text, when the answer is to begin with it.
        discard_tokens: the client wants no tokens, only the prompt's logprobs; the engine makes one all the same.
    """

    def __init__(
        self,
        *,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokens: TokenTable,
        stops: StopStrings,
        keep_stop_token: bool = False,
        echo: str | None = None,
        after_text: bool = False,
        discard_tokens: bool = False,
    ) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.token_ids: list[int] = []  # of the answer, the one that ended it included
        self.num_cached_tokens = 0  # of the prompt, which the engine did not have to compute
        self.finished = False
        self._tokens = tokens
        self._detokenizer = Detokenizer(tokens, after_text=after_text)
        self._stops = stops
        self._keep_stop_token = keep_stop_token
        self._echo = echo
        self._text_start = len(echo or "")
        self._discard_tokens = discard_tokens
        self._started = False
        self._delta = Delta(index)

    @property
    def num_tokens(self) -> int:
        """Of the answer."""
        return len(self.token_ids)

    def take(self, output: Output) -> Delta | None:
        """The delta this output makes certain, if any.

        Raises:
            ApiError: the engine gave the sequence up.
        """
        if output.finish_reason in ("error", "cancelled"):
            self.finished = True
            raise _given_up(output)
        if not self._started:
            self._start(output)
        if not self._discard_tokens:
            self._take_tokens(output)
        if output.finish_reason is not None and not self.finished:
            self._finish("length" if self._discard_tokens else output.finish_reason)
        return self._release()

    def _start(self, output: Output) -> None:
        self._started = True
        self.num_cached_tokens = output.num_cached_tokens
        self._delta.prompt_logprobs = output.prompt_logprobs
        if self._echo is not None:
            self._delta.text = self._echo
            self._delta.entries = self._prompt_entries(self._echo, output.prompt_logprobs)

    def _prompt_entries(self, echo: str, logprobs: list[TokenLogprob | None] | None) -> list[TokenEntry]:
        detokenizer, entries = Detokenizer(self._tokens), []
        for position, token_id in enumerate(self.prompt_token_ids):
            offset = min(detokenizer.num_chars, len(echo))
            entries.append(TokenEntry(token_id, offset, logprobs[position] if logprobs else None))
            detokenizer.push(token_id)
        return entries

    def _take_tokens(self, output: Output) -> None:
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            logprob = output.logprobs[position] if output.logprobs else None
            self._delta.entries.append(TokenEntry(token_id, self._text_start + self._detokenizer.num_chars, logprob))
            ends = output.stop_token_id is not None and position == len(output.token_ids) - 1
            if ends and not self._keep_stop_token:
                return
            self._add_text(self._detokenizer.push(token_id))
            if self.finished:
                return

    def _add_text(self, text: str) -> None:
        # Text of the first min_tokens tokens is wanted even when it holds a stop string.
        if len(self.token_ids) > self.params.min_tokens:
            text = self._stops.push(text)
        self._delta.text += text
        if self._stops.hit is not None:
            self.finished = True
            self._delta.finish_reason = "stop"

    def _finish(self, reason: str) -> None:
        self._add_text(self._detokenizer.flush())
        if not self.finished:
            self.finished = True
            self._delta.text += self._stops.flush()
            self._delta.finish_reason = reason

    def _release(self) -> Delta | None:
        """Logprobs wait for their text, so that a client never sees more of the answer in them than in the text."""
        if not self._delta.text and not self.finished:
            return None
        delta, self._delta = self._delta, Delta(self.index)
        return delta


def _given_up(output: Output) -> ApiError:
    if output.finish_reason == "cancelled":
        return unavailable(output.message or "the server ended this request before it was finished")
    return ApiError(500, f"the engine could not go on: {output.message or 'no reason given'}", code="engine_error")


async def generate(
    engine: EngineClient,
    sequences: Mapping[str, Sequence],
    timers: Mapping[str, SequenceTimer],
    ttft: TtftWatch,
    allreduce: str | None = None,
    cache_salt: str = "",
) -> AsyncGenerator[Delta, None]:
    """Run these sequences (by engine id) and yield what is new, interleaved, until all are finished.

    Closing the generator early cancels what still runs. ``allreduce``: what sums, by name; None: the server's own.
    ``cache_salt``: cached prompts are shared with requests of the same one alone.

    Raises:
        QueueFullError, EngineUnavailableError: nothing was started, or the engine died in the middle.
        ApiError: the engine gave a sequence up.
    """
    running, accepted = dict(sequences), False
    outcome = "cancelled"  # of what still runs when this ends: closed early, unless an error says otherwise
    requests = [AddRequest(id_, s.prompt_token_ids, s.params, allreduce, cache_salt) for id_, s in sequences.items()]
    try:
        # Implementations are async generators; the seam promises their aclose.
        ttft.hand_over()
        async with aclosing(cast(AsyncGenerator[Output, None], engine.submit(requests))) as outputs:
            async for output in outputs:
                accepted = True
                sequence = running.get(output.id)
                if sequence is None:
                    continue  # ended by a stop string, and its last outputs were on their way
                timers[output.id].saw_tokens(len(output.token_ids), output.queue_s)
                ttft.saw_token(output.first_token)
                delta = sequence.take(output)
                if delta and delta.finish_reason is not None:
                    del running[output.id]
                    timers[output.id].end(delta.finish_reason)
                    if output.finish_reason is None:
                        engine.cancel([output.id])
                if delta:
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
            timers[id_].end(outcome)
