"""The prompt chunks that pass the stages (``--layout hybrid``): when each leaves the last stage, and what it still writes.

A chunk that enters in step t leaves in step t + N - 1 with N stages, and its logits are chosen from in that step. A
sequence that has ended or was preempted meanwhile does not take its chunk back: the chunk passes on, its logits are not
asked for, and the ranks are told which of its blocks others write now.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tightwire.model.stages import MAX_LATE_STEPS
from tightwire.server.config.limits import Limits
from tightwire.server.engine.step_builder import Chunk, StagedStep


class _Entered(NamedTuple):
    chunk: Chunk
    epoch: int  # of its sequence when it entered
    first_row: int  # among the prompt rows of its step


class ChunksUnderWay:
    """Call ``advance`` once for every step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entered: deque[list[_Entered]] = deque([[] for _ in range(limits.num_stages - 1)])
        self._written: dict[int, set[int]] = {}  # by step: blocks that its chunk may still write to

    def __bool__(self) -> bool:
        """True if a step must be made for a chunk that is still wanted."""
        return any(_is_wanted(each) for step in self._entered for each in step)

    def advance(self, index: int, chunks: Sequence[Chunk], *, staged: bool) -> StagedStep:
        """Let the prompt chunks of step ``index`` enter, if they are ``staged``; return what else the step is about."""
        pipeline = self._limits.pipeline
        together = [] if pipeline else [c for c in chunks if not (staged and c.request.num_prompt_tokens > c.start)]
        awaits = max((chunk.request.entered_at for chunk in together), default=0)
        settled = max(awaits, index - MAX_LATE_STEPS)
        self._written = {step: blocks for step, blocks in self._written.items() if step > settled}
        rewritten: set[int] = set()
        if self._written:
            rewritten = set().union(*map(self._blocks, together)) & set().union(*self._written.values())
        leaving = [(each.chunk, each.first_row) for each in self._entered.popleft() if _is_wanted(each)]
        entered, num_rows = list[_Entered](), 0
        for chunk in chunks[len(together) :]:
            entered.append(_Entered(chunk, chunk.request.epoch, num_rows))
            num_rows += chunk.num_rows
            chunk.request.entered_at, chunk.request.ready_at = index, 0 if pipeline else index + self._limits.num_stages
        self._entered.append(entered)
        if entered and not pipeline:
            self._written[index] = set().union(*(self._blocks(each.chunk) for each in entered))
        return StagedStep(len(together), leaving, staged, awaits, sorted(rewritten))

    def _blocks(self, chunk: Chunk) -> set[int]:
        """The blocks that the chunk writes to."""
        first, stop = chunk.start // self._limits.block_size, self._limits.blocks_for(chunk.start + chunk.num_rows)
        return set(chunk.request.blocks[first:stop])


def _is_wanted(entered: _Entered) -> bool:
    return entered.chunk.request.epoch == entered.epoch
