"""A launched step that is not collected yet: its sequences, and the new tokens of each."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from tightwire.model.sampling.logprobs import TokenScore
from tightwire.model.sampling.sampler import Choice
from tightwire.model.step import deferred_token
from tightwire.model.transfer import Download
from tightwire.server.engine.request import Request
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.messages import TokenLogprob


class NewTokens:
    """One sequence's tokens from a step. Its request gets each token as soon as it is chosen."""

    def __init__(self, chunk: Chunk, row: int) -> None:
        """``row``: the first row of logits that chooses a token for it."""
        self.chunk, self.row = chunk, row
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.broken = False  # the logits are not finite, so no token can be chosen
        self._is_deferred = False

    def defer(self, index: int) -> None:
        """Append a deferred token until the real one is known. The last token of an answer needs none."""
        request = self.chunk.request
        if request.num_output_tokens + 1 < request.params.max_tokens:
            request.token_ids.append(deferred_token(index))
            self._is_deferred = True

    def undo_defer(self) -> None:
        if self._is_deferred:
            self.chunk.request.token_ids.pop()
            self._is_deferred = False

    def add(self, token_id: int, score: TokenScore | None) -> None:
        self.undo_defer()
        request = self.chunk.request
        if token_id < 0:
            self.broken = True
            return
        self.token_ids.append(token_id)
        request.token_ids.append(token_id)
        if score is not None:
            self.logprobs.append(TokenLogprob(*score))
        if token_id in request.stop_ids:  # never before min_tokens: the sampler bans them
            self.finish_reason = "stop"
        elif request.num_output_tokens >= request.params.max_tokens:
            self.finish_reason = "length"  # also at the context's end: prompt + max_tokens was checked to fit

    @property
    def draft_held(self) -> bool:
        """True if the last token matches the draft, so that there are logits for the next."""
        draft, num_new = self.chunk.draft, len(self.token_ids)
        if self.broken or self.finish_reason is not None or num_new > len(draft):
            return False
        return draft[num_new - 1] == self.token_ids[-1]


class LaunchedStep:
    """``choice`` holds one token for each of ``new``. Steps that score prompts or check drafts have ``logits_RV``
    instead.
    """

    def __init__(self, chunks: Sequence[Chunk], forward_pass: Download) -> None:
        """``chunks``: in the order of the rows of logits. ``forward_pass``: done when the forward pass is."""
        self.forward_pass = forward_pass
        self.choice: Choice | None = None
        self.logits_RV: Tensor | None = None
        self.scored: list[tuple[Chunk, slice]] = []  # with the rows of logits that score its prompt
        self.new: list[NewTokens] = []
        self.num_seqs = len(chunks)
        self._chunks = {chunk.request: chunk for chunk in chunks}
        row = 0
        for chunk in chunks:
            first = row + len(chunk.scored)
            if chunk.scored:
                self.scored.append((chunk, slice(row, first)))
            if chunk.samples:
                self.new.append(NewTokens(chunk, first))
            row = first + chunk.samples + len(chunk.draft)

    @property
    def chunks(self) -> Iterator[Chunk]:
        """The chunks of sequences that were not dropped."""
        return iter(self._chunks.values())

    @property
    def is_wanted(self) -> bool:
        return bool(self._chunks)

    def has(self, request: Request) -> bool:
        return request in self._chunks

    @property
    def is_simple(self) -> bool:
        """True if the step yields only one token for some of its sequences."""
        return not self.scored and not any(new.chunk.draft for new in self.new)

    @property
    def may_be_followed(self) -> bool:
        """True if the next step can be planned before this one's tokens are known."""
        return self.is_simple and not any(new.chunk.request.needs_tokens for new in self.new)

    def defer_tokens(self) -> None:
        """Put deferred tokens in place of those being chosen, so that the next step can be planned."""
        for index, new in enumerate(self.new):
            if self.has(new.chunk.request):
                new.defer(index)

    def undo_defer(self) -> None:
        """Remove the deferred tokens again: the next step could not be planned."""
        for new in self.new:
            new.undo_defer()

    def drop(self, request: Request) -> None:
        """Discard this step's result for ``request``, which has ended or must compute it again."""
        chunk = self._chunks.pop(request, None)
        if chunk is not None:
            request.num_computed = chunk.start
