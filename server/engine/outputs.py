"""What the engine tells of a sequence beside its tokens: how long it waited, its prompt's scores, and how it ended."""

from tightwire.server.engine.request import Request
from tightwire.server.ipc.messages import Output, TokenLogprob


def last_words(request: Request, finish_reason: str, message: str | None = None) -> Output:
    """An end without a new token; an echo still brings its prompt logprobs."""
    return Output(
        id=request.id,
        token_ids=[],
        prompt_logprobs=None if finish_reason == "error" else scores_once(request),
        finish_reason=finish_reason,
        message=message,
        queue_s=None if finish_reason == "error" else waited_s(request),
    )


def scores_once(request: Request) -> list[TokenLogprob | None] | None:
    """The prompt's logprobs the first time, None after."""
    logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return logprobs


def waited_s(request: Request) -> float | None:
    return None if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s
