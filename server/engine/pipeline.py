"""Launches steps on the ranks and collects their tokens, with at most one step planned ahead; in a pipeline several are under way.

A step that depends on the previous one's result is planned after it (docs/serving.md, "Planning ahead").
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from tightwire.comm.lane import Pending
from tightwire.comm.ledger.ledger import Spent
from tightwire.kernels.transfer import Download
from tightwire.model.sampling.parameters import TokenScore
from tightwire.model.sampling.sampler import Choice, Sampled, Sampler, Wanted
from tightwire.model.step import StepPlan, deferred_token, gather_sizes
from tightwire.server.engine.request import Reading, Request
from tightwire.server.engine.scheduler import Replicas
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.engine_stats import EngineCounters, RankCounts

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class StepRunner(Protocol):
    """The ranks, as the engine on rank 0 uses them."""

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        """Send each replica's plan to its other ranks, before this rank runs the first one."""

    def execute(self, plan: StepPlan, chosen_R: Tensor | None) -> Tensor | None:
        """Run one plan on this rank. ``chosen_R``: (R,) int32, the tokens that deferred tokens stand for.

        Returns this rank's columns of the logits of ``logit_rows``, (R, local_V) float32; None when R is 0.
        """

    def choose(self, plans: Sequence[StepPlan], logits_RV: Tensor | None, banned: Sequence[bytes]) -> Tensor | Pending:
        """Choose an executed step's tokens: ``ModelRunner.choose``'s results of all replicas. ``banned``: of each plan's masked rows."""
        ...

    def step_tokens(self) -> int | None:
        """The token limit of each replica's next step; None: the configured limit."""

    def comm_spent(self) -> Spent: ...

    def counts(self) -> RankCounts: ...


class StepTimes:
    """Running totals of rank 0's time by kind of work; a sequence's times are differences of two readings.

    On CUDA ``sampling`` includes waiting for the device; with steps planned ahead, also launching the next one.
    """

    def __init__(self, clock: Callable[[], float], comm: Callable[[], Spent]) -> None:
        self._clock, self._comm = clock, comm
        self._forward_s = self._sampling_s = 0.0

    def read(self) -> Reading:
        return Reading(self._clock(), self._forward_s, self._sampling_s, self._comm())

    def forward(self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Run ``work``, this rank's part of a forward pass."""
        start_s = self._clock()
        result = work(*args, **kwargs)
        self._forward_s += self._clock() - start_s
        return result

    def sampling(self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Run ``work``, which chooses or scores tokens. Its collectives count as a part of the forward pass."""
        start_s, comm_s = self._clock(), self._comm().seconds
        result = work(*args, **kwargs)
        comm_s = self._comm().seconds - comm_s
        self._forward_s += comm_s
        self._sampling_s += self._clock() - start_s - comm_s
        return result


class NewTokens:
    """One sequence's tokens from a step. Its request gets each token as soon as it is chosen."""

    def __init__(self, chunk: Chunk, row: int) -> None:
        """``row``: the first row of logits that chooses a token for it."""
        self.chunk, self.row = chunk, row
        self.token_ids: list[int] = []
        self.num_forced = 0  # how many tokens at the end were forced by the grammar, without logits
        self.logprobs: list[TokenScore] = []
        self.finish_reason: str | None = None
        self.broken = 0  # NOT_FINITE or ALL_BANNED if no token can be chosen
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
            self.broken = token_id
            return
        self.token_ids.append(token_id)
        request.token_ids.append(token_id)
        if score is not None:
            self.logprobs.append(score)
        if token_id in request.stop_ids:  # never before min_tokens: the sampler bans them
            self.finish_reason = "stop"
        elif request.num_output_tokens >= request.params.max_tokens:
            self.finish_reason = "length"  # also at the context's end: prompt + max_tokens was checked to fit

    def add_sampled(self, sampled: Sampled) -> None:
        """Add the tokens of a step: the next one, and the following ones while they match the draft."""
        self.add(sampled.token_ids[self.row], sampled.scores[self.row])
        while self.draft_held:
            row = self.row + len(self.token_ids)
            self.add(sampled.token_ids[row], sampled.scores[row])

    def add_forced(self, token_ids: Sequence[int]) -> None:
        """Add tokens that need no forward pass, until one ends the answer."""
        for token_id in token_ids:
            if self.finish_reason is None:
                self.add(token_id, None)
                self.num_forced += 1

    @property
    def chosen(self) -> list[int]:
        """Its tokens that have logits."""
        return self.token_ids[: len(self.token_ids) - self.num_forced]

    @property
    def num_right(self) -> int:
        """How many of its drafted tokens were right: those at the beginning that were chosen too."""
        pairs = zip(self.chosen, self.chunk.draft, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def draft_held(self) -> bool:
        """True if the last token matches the draft, so that there are logits for the next."""
        draft, num_new = self.chunk.draft, len(self.token_ids)
        if self.broken or self.finish_reason is not None or num_new > len(draft):
            return False
        return draft[num_new - 1] == self.token_ids[-1]


class LaunchedStep:
    """``choice`` has a token or a score for each row of logits; None if there are none."""

    def __init__(self, chunks: Sequence[Chunk], forward_pass: Download, choice: Choice | None) -> None:
        """``chunks``: the chunks in the order of their rows of logits. ``forward_pass``: a future, done when the forward pass is."""
        self.forward_pass, self.choice = forward_pass, choice
        self.scored: list[tuple[Chunk, slice]] = []  # with the rows of logits that score its prompt
        self.new: list[NewTokens] = []
        self.num_seqs = len(chunks)
        self._chunks = {chunk.request: (chunk, chunk.request.epoch) for chunk in chunks}
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
        """The chunks of sequences that were not dropped or preempted."""
        return (chunk for chunk, epoch in self._chunks.values() if chunk.request.epoch == epoch)

    @property
    def is_wanted(self) -> bool:
        return bool(self._chunks)

    @property
    def has_ended(self) -> bool:
        """True if it has no tokens to wait for, because it has none or they have come from the last stage."""
        return self.choice is None or self.choice.has_come

    def has(self, request: Request) -> bool:
        found = self._chunks.get(request)
        return found is not None and found[1] == request.epoch

    @property
    def may_be_followed(self) -> bool:
        """True if the next step can be planned before this one's tokens are known: at most one for each sequence."""
        return not self.scored and not any(new.chunk.draft or new.chunk.request.needs_tokens for new in self.new)

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
        if self.has(request):
            request.num_computed = self._chunks.pop(request)[0].start


class Collected(NamedTuple):
    new: list[NewTokens]  # only of sequences that have not ended meanwhile
    scored: list[Request]  # ended with their prompt's scores and nothing to generate
    broken: list[Request]  # ended because their prompt's scores are not finite


class StepPipeline:
    """Call ``next`` and ``collect`` in turn. Owns the steps that run ahead."""

    def __init__(
        self,
        runner: StepRunner,
        sampler: Sampler,
        replicas: Replicas,
        times: StepTimes,
        counters: EngineCounters,
        *,
        plan_ahead: bool,
        most_launched: int = 1,
    ) -> None:
        """``most_launched``: steps of a pipeline that may run before the first of them is collected."""
        self._runner, self._sampler, self._replicas = runner, sampler, replicas
        self._times, self._counters, self._plan_ahead = times, counters, plan_ahead
        self._most_launched = most_launched
        self._launched: deque[LaunchedStep] = deque()  # not collected yet

    def next(self) -> LaunchedStep | None:
        """The step to collect now, launched here or earlier. With ``plan_ahead``, launches its successor if it can."""
        launched = self._launched
        if self._plan_ahead and launched and not launched[0].is_wanted:  # all its sequences have ended
            launched.popleft()
        while len(launched) < self._most_launched and not (launched and launched[0].has_ended):
            if (step := self._launch(None)) is None:
                break
            launched.append(step)
        step = launched.popleft() if launched else None
        if step and self._plan_ahead and step.may_be_followed and not self._replicas.may_draft(step.num_seqs):
            ahead = self._launch(step)
            launched.extend([] if ahead is None else [ahead])
        return step

    def collect(self, step: LaunchedStep) -> Collected:
        """Wait for the step; score prompts and choose tokens."""
        # Wait even without tokens, so that requests that arrive meanwhile join the next step.
        self._times.sampling(step.forward_pass.wait)
        new, broken = list[NewTokens](), list[Request]()
        if step.choice is not None:  # the last row of a prompt that is only scored has no logits
            sampled = self._times.sampling(step.choice.wait)
            for chunk, rows in step.scored:
                if step.has(chunk.request) and not _add_prompt_scores(chunk.request, sampled.scores[rows]):
                    broken.append(chunk.request)
                    step.drop(chunk.request)
            new = [new for new in step.new if step.has(new.chunk.request)]
            for each in new:
                each.add_sampled(sampled)
            self._add_forced(new)
        return Collected(new, [c.request for c in step.chunks if c.is_last_of_scored], broken)

    def _add_forced(self, new: Sequence[NewTokens]) -> None:
        """Append what each grammar leaves no choice about; the next step computes it together with the last token."""
        for each in new:
            request = each.chunk.request
            if request.params.grammar and each.finish_reason is None and not each.broken:
                assert self._sampler.grammars is not None
                each.add_forced(self._times.sampling(self._sampler.grammars.forced, request))
                self._counters.num_forced_tokens += each.num_forced

    def forget(self, request: Request) -> None:
        for step in self._launched:
            step.drop(request)
        self._sampler.release(request)

    def _launch(self, last: LaunchedStep | None) -> LaunchedStep | None:
        """Plan a step and launch it with the choice of its tokens; None: nothing to launch. ``last``: the step that still runs."""
        begun = self._times.read()
        if last is not None:
            last.defer_tokens()
        if (step_tokens := self._runner.step_tokens()) is not None:
            self._replicas.limit_steps(step_tokens)
        step = self._replicas.schedule(begun.at_s, ahead=last is not None)
        if step is None:
            if last is not None:
                last.undo_defer()
            return None
        for chunk in step.chunks:
            chunk.request.at_first_step = chunk.request.at_first_step or begun
            chunk.request.num_computed = chunk.end
        constrained = [chunk.request for chunk in step.results if chunk.samples and chunk.request.params.grammar]
        if constrained:
            assert self._sampler.grammars is not None
            self._sampler.grammars.begin(constrained)
        chosen_R = None if last is None or last.choice is None else last.choice.ids_R
        replicas = range(len(step.plans))
        wanted = [[c.wanted for c in step.results if c.request.replica == replica] for replica in replicas]
        plans = self._times.sampling(self._with_rows, step.plans, wanted)
        self._runner.broadcast(plans)
        logits_RV = self._times.forward(self._runner.execute, plans[0], chosen_R)
        self._replicas.learn(step, self._times.read().at_s - begun.at_s)
        self._counters.num_steps += 1
        self._counters.num_steps_ahead += last is not None
        choice = None
        if any(plan.logit_rows for plan in plans):
            banned = [self._times.sampling(self._sampler.banned, each) for each in wanted]
            results = self._times.sampling(self._runner.choose, plans, logits_RV, banned)
            choice = Choice(results, [plan.sampling for plan in plans])
        return LaunchedStep(step.results, Download([torch.empty(0) if logits_RV is None else logits_RV[:0]]), choice)

    def _with_rows(self, plans: Sequence[StepPlan], wanted: Sequence[Sequence[Wanted]]) -> list[StepPlan]:
        plans = [replace(plan, sampling=self._sampler.rows(each)) for plan, each in zip(plans, wanted, strict=True)]
        sizes = gather_sizes(plans)
        return [replace(plan, gather_sizes=sizes) for plan in plans] if sizes else plans


def _add_prompt_scores(request: Request, scores: Sequence[TokenScore | None]) -> bool:
    """Append the prompt's logprobs; False if they are not finite."""
    assert request.prompt_logprobs is not None
    found = [score for score in scores if score is not None]
    request.prompt_logprobs.extend(found)
    return not any(math.isnan(each.logprob) for each in found)
