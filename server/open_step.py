"""A step being put together: who takes how many tokens, and what is left of its budgets."""

from tightwire.server.limits import Limits
from tightwire.server.request import Request
from tightwire.server.scheduled_step import Chunk, make_chunk


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

    def affordable(self, request: Request, reserved: int = 0) -> int:
        """How many of its tokens ``request`` may compute in this step, with as much of the budget left as ``reserved``."""
        num_tokens = min(request.num_to_compute, self.budget - reserved)
        if request.in_prompt:
            # A chunk ends where the prompt does: generated tokens, recomputed, keep the kernels they were made with.
            num_tokens = min(num_tokens, request.num_prompt_tokens - request.num_computed)
        rows = request.rows_to_score(request.num_computed, request.num_computed + num_tokens)
        if len(rows) > self._scored_rows:
            num_tokens = rows.start + self._scored_rows - request.num_computed
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        self.tokens[request] = num_tokens
        self.budget -= num_tokens
        self._scored_rows -= len(request.rows_to_score(request.num_computed, request.num_computed + num_tokens))

    @property
    def room_for_draft(self) -> int:
        return min(self.budget, self._scored_rows)

    def take_draft(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = draft
        self.budget -= len(draft)
        self._scored_rows -= len(draft)

    def drop(self, request: Request) -> None:
        """Leave out a preempted sequence, though it was given tokens; what they took of the budgets stays spent."""
        self.preempted.add(request)
        self.tokens.pop(request, None)

    def chunks(self) -> list[Chunk]:
        """Generated tokens first, as ``StepPlan`` wants them."""
        shares = sorted(self.tokens.items(), key=lambda share: share[0].in_prompt)
        return [make_chunk(request, num_tokens, self._drafts.get(request, ())) for request, num_tokens in shares]
