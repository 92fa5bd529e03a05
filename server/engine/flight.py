"""A step that was launched and not collected yet: whose it is, and what each sequence gets of it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from tightwire.model.sampling.logprobs import TokenScore
from tightwire.model.sampling.sampler import Choice
from tightwire.model.step import deferred_token
from tightwire.model.transfer import Download
from tightwire.server.engine.request import Request
from tightwire.server.engine.scheduled_step import Chunk
from tightwire.server.ipc.messages import TokenLogprob


class NewTokens:
    """What one sequence gets in a step; its request has each token as soon as it is chosen."""

    def __init__(self, chunk: Chunk, row: int) -> None:
        """``row``: of the logits, the first that chooses for it."""
        self.chunk, self.row = chunk, row
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.broken = False  # what the last row's logits say is nothing to choose by
        self._is_referred = False

    def refer(self, index: int) -> None:
        """Let a reference stand for the token until it is known. The last token of an answer needs none."""
        request = self.chunk.request
        if request.num_output_tokens + 1 < request.params.max_tokens:
            request.token_ids.append(deferred_token(index))
            self._is_referred = True

    def take_back(self) -> None:
        if self._is_referred:
            self.chunk.request.token_ids.pop()
            self._is_referred = False

    def add(self, token_id: int, score: TokenScore | None) -> None:
        self.take_back()
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
            self.finish_reason = "length"  # the context's end too: prompt + max_tokens was checked to fit

    @property
    def guess_held(self) -> bool:
        """Whether the token chosen last is the one that was guessed: then there are logits for the next."""
        draft, num_new = self.chunk.draft, len(self.token_ids)
        if self.broken or self.finish_reason is not None or num_new > len(draft):
            return False
        return draft[num_new - 1] == self.token_ids[-1]


class Flight:
    """A step's tokens: ``choice``, one of each of ``new``, or where prompts are scored and guesses checked, ``logits_RV``."""

    def __init__(self, chunks: Sequence[Chunk], forward_pass: Download) -> None:
        """``chunks``: in the order of the logits' rows. ``forward_pass``: comes to its end with it."""
        self.forward_pass = forward_pass
        self.choice: Choice | None = None
        self.logits_RV: Tensor | None = None
        self.scored: list[tuple[Chunk, slice]] = []  # with the rows of logits that score it
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
        """Of the sequences that something comes of."""
        return iter(self._chunks.values())

    @property
    def is_wanted(self) -> bool:
        return bool(self._chunks)

    def has(self, request: Request) -> bool:
        return request in self._chunks

    @property
    def is_simple(self) -> bool:
        """Whether all it brings is one token for some sequences."""
        return not self.scored and not any(new.chunk.draft for new in self.new)

    @property
    def may_be_followed(self) -> bool:
        """Whether the next step can be planned before this one's tokens are known.

        Not if prompts are scored, guesses checked, or a sequence has penalties, for which the host counts its tokens.
        """
        return self.is_simple and not any(new.chunk.request.params.needs_tokens for new in self.new)

    def refer(self) -> None:
        """Let references stand for the tokens that are being chosen, for the next step to be planned."""
        for index, new in enumerate(self.new):
            if self.has(new.chunk.request):
                new.refer(index)

    def take_back(self) -> None:
        """Take the references back: the next step could not be planned."""
        for new in self.new:
            new.take_back()

    def drop(self, request: Request) -> None:
        """Nothing comes of what ``request`` has in this step: it has ended, or is to compute that again."""
        chunk = self._chunks.pop(request, None)
        if chunk is not None:
            request.num_computed = chunk.start
