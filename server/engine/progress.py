"""Reports after each step how much of a prompt is computed, for the requests that ask for it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tightwire.server.engine.request import Request
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.messages import Output, PromptProgress


class _Reported(NamedTuple):
    end: int = 0  # tokens of the prompt before this one are in the KV cache
    computed: int = 0  # those of them that steps computed for this request


class PromptWatch:
    """Watches each added request until its prompt is computed. ``requests``: those; remove one that ends earlier."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requests: dict[Request, _Reported] = {}  # with the last report

    def add(self, request: Request) -> None:
        self.requests[request] = _Reported()

    def take(self, chunks: Iterable[Chunk]) -> list[Output]:
        """One output for each watched request that a step brought forward.

        Preempted requests compute a part of their prompt again; they are not reported until they are past it.
        """
        now_s = self._clock()
        outputs: list[Output] = []
        for chunk in chunks:
            request, end, last = chunk.request, chunk.end, self.requests.get(chunk.request)
            if last is None or end <= last.end:
                continue
            # Not from request.num_cached_tokens: a step planned ahead may have counted tokens after this chunk.
            computed = last.computed + end - max(chunk.start, last.end)
            if end < request.num_prompt_tokens:
                self.requests[request] = _Reported(end, computed)
            else:
                del self.requests[request]
            assert request.first_scheduled_s is not None, "a chunk before the first step"
            seconds = now_s - request.first_scheduled_s
            progress = PromptProgress(
                prompt_tokens=request.num_prompt_tokens, cached=end - computed, computed=computed, seconds=seconds
            )
            outputs.append(Output(id=request.id, token_ids=[], progress=progress))
        return outputs
