"""A step being put together: who takes how many tokens, and what is left of its budgets.

Where a step's sequences may have only so many blocks together (their keys and values come from the host), these are a budget
too: a block that several share is paid for once.
"""

from tightwire.server.config.limits import Limits
from tightwire.server.engine.request import Request
from tightwire.server.engine.scheduled_step import Chunk, make_chunk


class OpenStep:
    """Open until its ``chunks`` are taken. What a sequence takes it has blocks for: the scheduler sees to that."""

    def __init__(self, limits: Limits, budget: int, *, ahead: bool = False) -> None:
        """``budget``: tokens that it may take in all. ``ahead``: planned while the last step runs."""
        self.ahead = ahead
        self.preempted: set[Request] = set()
        self.tokens: dict[Request, int] = {}
        self._drafts: dict[Request, list[int]] = {}
        self.budget = budget  # tokens that may still be taken
        self._scored_rows = limits.max_scored_rows
        self._limits = limits
        self._blocks: set[int] = set()  # of all who take part, where they are limited
        self._reserved: tuple[Request, int] | None = None  # blocks that others must leave for this one

    def affordable(self, request: Request, reserved: int = 0) -> int:
        """How many of its tokens ``request`` may compute in this step, with as much of the budget left as ``reserved``."""
        num_tokens = min(request.num_to_compute, self.budget - reserved)
        if request.in_prompt:
            # A chunk ends where the prompt does: generated tokens, recomputed, keep the kernels they were made with.
            num_tokens = min(num_tokens, request.num_prompt_tokens - request.num_computed)
        rows = request.rows_to_score(request.num_computed, request.num_computed + num_tokens)
        if len(rows) > self._scored_rows:
            num_tokens = rows.start + self._scored_rows - request.num_computed
        return min(num_tokens, self._tokens_in_blocks(request))

    def reserve(self, request: Request) -> None:
        """Leave it the blocks of the tokens it could take now, whoever takes part before it."""
        self._reserved = request, self._limits.blocks_for(request.num_computed + self.affordable(request))

    def take(self, request: Request, num_tokens: int) -> None:
        self.tokens[request] = num_tokens
        if self._reserved is not None and self._reserved[0] is request:
            self._reserved = None
        self._take_blocks(request, num_tokens)
        self.budget -= num_tokens
        self._scored_rows -= len(request.rows_to_score(request.num_computed, request.num_computed + num_tokens))

    def room_for_draft(self, request: Request) -> int:
        """How many guesses ``request`` may bring along, behind the one token it takes."""
        return min(self.budget, self._scored_rows, self._tokens_in_blocks(request) - 1)

    def take_draft(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = draft
        self._take_blocks(request, 1 + len(draft))
        self.budget -= len(draft)
        self._scored_rows -= len(draft)

    def drop(self, request: Request) -> None:
        """Leave out a preempted sequence, though it was given tokens; what they took of the budgets stays spent."""
        self.preempted.add(request)
        self.tokens.pop(request, None)

    def _tokens_in_blocks(self, request: Request) -> int:
        """How many tokens of ``request`` the blocks have room for that the step may still need; not below 0."""
        most = self._limits.max_step_blocks
        if most is None:
            return self.budget + 1  # no limit: a draft may take all of it, behind a token that is paid for
        free = most - len(self._blocks) - sum(block not in self._blocks for block in request.blocks)
        if self._reserved is not None and self._reserved[0] is not request:
            free -= self._reserved[1]
        room = (len(request.blocks) + free) * self._limits.block_size
        return max(0, room - request.num_computed)

    def _take_blocks(self, request: Request, num_tokens: int) -> None:
        if self._limits.max_step_blocks is not None:
            self._blocks.update(request.blocks[: self._limits.blocks_for(request.num_computed + num_tokens)])

    def chunks(self) -> list[Chunk]:
        """Generated tokens first, as ``StepPlan`` wants them."""
        shares = sorted(self.tokens.items(), key=lambda share: share[0].in_prompt)
        return [make_chunk(request, num_tokens, self._drafts.get(request, ())) for request, num_tokens in shares]
