"""The engine: one step of the scheduler, the model and the sampler after the other, on rank 0.

Given everything it uses, so that tests run it without a model, a process or a clock. Not thread-safe: one loop calls
``add``, ``cancel`` and ``step``. What the runner or the sampler raises goes through to that loop; a request that cannot
run, or whose logits are not numbers, ends with an error of its own and leaves the others alone.

A device need not wait for what the host does between two steps. Planning ahead, the engine launches step N + 1 while N
runs, and only then waits for N's tokens, takes them in and tells them. Each sequence that goes on has a row in N + 1 for the
token that N chooses, which the device puts in itself (``model/references``). One that turns out to have ended
has computed that row for nothing. N is collected first where N + 1 depends on what came of it: when prompts are scored,
guesses are or may be made, a sequence has penalties, or blocks run out.

Of several replicas of the model each has a scheduler (``replicas``), and a step has a plan for each. Rank 0 is in the first
replica, gets the logits of all, and chooses for every sequence.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Spent
from tightwire.model.sampling.sampler import Choice, Sampler
from tightwire.model.step import StepPlan
from tightwire.model.transfer import Download
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.flight import Flight, NewTokens
from tightwire.server.engine.outputs import last_words, scores_once, waited_s
from tightwire.server.engine.replicas import Replicas
from tightwire.server.engine.request import Request, make_request, why_refused
from tightwire.server.engine.scheduled_step import Chunk
from tightwire.server.engine.step_times import StepTimes, first_token
from tightwire.server.ipc.engine_stats import CacheCount, CommCount, EngineCounters, EngineStats, StreamCount
from tightwire.server.ipc.messages import AddRequest, FirstToken, Output, StepResult, TokenLogprob

_log = logging.getLogger(__name__)

_NOT_FINITE = "the model's scores for this sequence are not finite numbers, so no token can be chosen"


class Runner(Protocol):
    """Runs one plan on this rank; gives (R, V) float32 logits for the plan's ``logit_rows``, None when R is 0.

    With the plan's ``meeting`` R counts the rows of all replicas, which come one after the other.

    ``chosen_R``: what was chosen after the last plan, (R,) int32, for this one to refer to.
    """

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None: ...


class Engine:
    """Turns requests into tokens."""

    def __init__(
        self,
        *,
        runner: Runner,
        sampler: Sampler,
        limits: Limits,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        broadcast: Callable[[Sequence[StepPlan]], None] = lambda plans: None,
        comm_counts: Callable[[], list[CommCount]] = list,
        arms: Sequence[str] = ("auto",),
        comm_spent: Callable[[], Spent] = Spent,
        drafter: NgramDrafter | None = None,
        plan_ahead: bool = False,
        num_replicas: int = 1,
        step_tokens: Callable[[], int] | None = None,
        stream_count: Callable[[], StreamCount | None] = lambda: None,
        cache_count: Callable[[], CacheCount | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``broadcast`` hands each replica's plan to its ranks before this one runs the first; ``comm_counts`` fills the stats.

        ``comm_spent``: the time of all collectives so far. ``arms``: the AllReduces that a request may name, the server's
        own first; their places are the plans' arms. ``drafter``: guesses tokens ahead; None: nothing does.
        ``plan_ahead``: launch each step before the last one is waited for, where that can be; for one replica.
        ``limits``: of each replica. ``step_tokens``: how many the next step of each may take; default: what ``limits`` say.
        ``stream_count``, ``cache_count``: of layers that stream and of a KV cache on the host, for the stats.
        """
        if plan_ahead and num_replicas > 1:
            raise ValueError(f"steps of {num_replicas} replicas cannot be planned ahead")
        self._runner, self._sampler, self._broadcast = runner, sampler, broadcast
        self._comm_counts, self._clock = comm_counts, clock
        self._times = StepTimes(clock, comm_spent)
        self._limits, self._vocab_size, self._plan_ahead = limits, vocab_size, plan_ahead
        self._arms = tuple(arms)
        self._eos_token_ids = frozenset(eos_token_ids)
        if outside := [i for i in self._eos_token_ids if not 0 <= i < vocab_size]:
            raise ValueError(f"end tokens {outside} are outside the vocabulary of {vocab_size}")
        self._counters = EngineCounters()
        self._replicas = Replicas(limits, num_replicas, drafter, self._counters)
        self._step_tokens, self._stream_count, self._cache_count = step_tokens, stream_count, cache_count
        self._requests: dict[str, Request] = {}
        self._pending: list[Output] = []  # ends that happened between steps
        self._flight: Flight | None = None  # launched, but not collected

    def add(self, message: AddRequest, replica: int | None = None) -> None:
        """Queue a sequence; it joins the next step. One that cannot run gets its error with the next step.

        ``replica``: that is to compute it; None: the one that suits.
        """
        if message.id in self._requests:
            # Its sender breaks the protocol. An error under this id would end the sequence that is running.
            _log.error("request %s is already running; the second one of that id is ignored", message.id)
            return
        refusal = why_refused(
            message, vocab_size=self._vocab_size, max_model_len=self._limits.max_model_len, arms=self._arms
        )
        if refusal is not None:
            self._pending.append(Output(id=message.id, token_ids=[], finish_reason="error", message=refusal))
            return
        arm = 0 if message.allreduce is None else self._arms.index(message.allreduce)
        request = make_request(message, self._eos_token_ids, self._clock(), arm)
        if request.params.max_tokens == 0 and not request.rows_to_score(0, request.num_prompt_tokens):
            self._pending.append(last_words(request, "length"))  # nothing to generate and nothing to score
            return
        self._requests[request.id] = request
        self._replicas.add(request, replica)

    def cancel(self, ids: Sequence[str]) -> None:
        """End these and free their blocks now; their last ``Output`` comes with the next step."""
        for request_id in ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)
                self._pending.append(Output(id=request_id, token_ids=[], finish_reason="cancelled"))

    def has_work(self) -> bool:
        """Whether ``step`` would run something or has something to tell."""
        return bool(self._pending or self._requests)

    def step(self) -> StepResult:
        """Run one forward pass, if any sequence needs one, and say what came of it.

        Planning ahead: of the one that was launched in the last call, and launch the next before waiting for it.
        """
        outputs, self._pending = self._pending, []
        flight, self._flight = self._flight, None
        if flight is None or not flight.is_wanted:  # all who were in it have ended
            flight = self._launch(None)
        if flight is not None:
            if self._plan_ahead and flight.may_be_followed and not self._replicas.may_guess(flight.num_seqs):
                self._flight = self._launch(flight)
            self._collect(flight, outputs)
        return StepResult(outputs=outputs, stats=self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(
            loads=self._replicas.loads(),
            counters=copy.copy(self._counters),
            stream=self._stream_count(),
            kv_offload=self._cache_count(),
            comm=self._comm_counts(),
        )

    def _launch(self, last: Flight | None) -> Flight | None:
        """Plan a step, have it run and its tokens chosen, and wait for nothing; None: there is none to be had now.

        ``last``: the step that still runs.
        """
        begun = self._times.read()
        if last is not None:
            last.refer()
        if self._step_tokens is not None:
            self._replicas.limit_steps(self._step_tokens())
        step = self._replicas.schedule(begun.at_s, ahead=last is not None)
        if step is None:
            if last is not None:
                last.take_back()
            return None
        for chunk in step.chunks:
            chunk.request.at_first_step = chunk.request.at_first_step or begun
            chunk.request.num_computed = chunk.end
        self._broadcast(step.plans)
        chosen_R = None if last is None or last.choice is None else last.choice.ids_R
        logits_RV = self._times.forward(self._runner.execute, step.plans[0], chosen_R)
        if logits_RV is None:
            assert not any(plan.logit_rows for plan in step.plans), "the engine runs on rank 0, which has the logits"
            logits_RV = torch.empty((0, self._vocab_size))
        self._counters.num_steps += 1
        self._counters.num_steps_ahead += last is not None
        flight = Flight(step.chunks, Download([logits_RV[:0]]))
        if not flight.is_simple:
            flight.logits_RV = logits_RV
        elif flight.new:
            requests = [new.chunk.request for new in flight.new]
            waits = not self._plan_ahead
            flight.choice = self._times.sampling(self._sampler.start, logits_RV, requests, waits=waits)
        return flight

    def _collect(self, flight: Flight, outputs: list[Output]) -> None:
        """Wait for a step, score prompts, and append what each sequence got to ``outputs``."""
        self._times.sampling(flight.forward_pass.wait)  # also where nothing comes of it: who comes now is to be next
        if flight.logits_RV is not None:
            self._score_prompts(flight, flight.logits_RV, outputs)
        for chunk in flight.chunks:
            if not chunk.samples and chunk.end == len(chunk.request.token_ids):  # echo only
                self._counters.num_prompt_tokens += chunk.request.num_prompt_tokens
                outputs.append(self._end(chunk.request, "length"))
        chosen = [new for new in flight.new if flight.has(new.chunk.request)]
        if flight.choice is not None:
            self._take(flight, flight.choice)
        elif flight.logits_RV is not None:
            self._choose(chosen, flight.logits_RV)
        for new in chosen:
            if new.token_ids:
                outputs.append(self._tell(new))
            if new.broken:
                outputs.append(self._end(new.chunk.request, "error", _NOT_FINITE))

    def _take(self, flight: Flight, choice: Choice) -> None:
        """Give each sequence the token that was chosen when the step was launched."""
        result = self._times.sampling(choice.wait)
        for new, token_id, score in zip(flight.new, result.token_ids, result.scores, strict=True):
            if flight.has(new.chunk.request):
                new.add(token_id, score)
        if self._flight is not None:
            for row in result.late:  # the next step was launched without knowing the token
                self._flight.drop(flight.new[row].chunk.request)

    def _choose(self, chosen: Sequence[NewTokens], logits_RV: Tensor) -> None:
        """Choose every sequence's next token, and the one after where that was guessed, as long as guesses hold.

        The logits behind a right guess are those that the token itself would have led to, so the text is what it would be
        without guessing, to the bit, drawn tokens too.
        """
        going_on = list(chosen)
        while going_on:
            rows = [new.row + len(new.token_ids) for new in going_on]
            chosen_RV = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
            requests = [new.chunk.request for new in going_on]
            result = self._times.sampling(self._sampler.sample, chosen_RV, requests)
            for new, token_id, score in zip(going_on, result.token_ids, result.scores, strict=True):
                new.add(token_id, score)
            going_on = [new for new in going_on if new.guess_held]

    def _score_prompts(self, flight: Flight, logits_RV: Tensor, outputs: list[Output]) -> None:
        for chunk, rows in flight.scored:
            if flight.has(chunk.request) and not self._score(chunk, logits_RV[rows]):
                flight.drop(chunk.request)
                outputs.append(self._end(chunk.request, "error", _NOT_FINITE))

    def _score(self, chunk: Chunk, logits_RV: Tensor) -> bool:
        """Append the chunk's prompt logprobs; False when they are not numbers."""
        request, positions = chunk.request, chunk.scored
        assert request.prompt_logprobs is not None
        targets = request.token_ids[positions.start + 1 : positions.stop + 1]
        num_top = request.params.prompt_logprobs or 0
        scores = self._times.sampling(self._sampler.score, logits_RV, targets, num_top)
        request.prompt_logprobs.extend(TokenLogprob(*score) for score in scores)
        return not any(math.isnan(score.logprob) for score in scores)

    def _tell(self, new: NewTokens) -> Output:
        """The output that a step's new tokens make, the sequence's last one if it stops here."""
        request, finish_reason = new.chunk.request, new.finish_reason
        num_new = len(new.token_ids)
        request.num_computed += num_new - 1  # the guesses that held
        self._counters.num_generation_tokens += num_new
        if new.chunk.draft:
            self._counters.num_draft_tokens += len(new.chunk.draft)
            self._counters.num_accepted_draft_tokens += num_new - 1
            self._replicas.learn(request, num_new - 1)
        is_first = request.num_output_tokens == num_new
        if is_first:
            self._counters.num_prompt_tokens += request.num_prompt_tokens
        if finish_reason is not None:
            self._forget(request)
        return Output(
            id=request.id,
            token_ids=new.token_ids,
            logprobs=new.logprobs or None,
            prompt_logprobs=scores_once(request),
            finish_reason=finish_reason,
            stop_token_id=new.token_ids[-1] if finish_reason == "stop" else None,
            queue_s=waited_s(request) if is_first else None,
            first_token=self._first_token(request) if is_first else None,
            num_cached_tokens=request.num_cached_tokens if is_first else 0,
        )

    def _first_token(self, request: Request) -> FirstToken:
        assert request.at_first_step is not None, "a token before the first step"
        return first_token(request.at_first_step, self._times.read())

    def _end(self, request: Request, finish_reason: str, message: str | None = None) -> Output:
        self._forget(request, spoiled=finish_reason == "error")
        return last_words(request, finish_reason, message)

    def _forget(self, request: Request, *, spoiled: bool = False) -> None:
        del self._requests[request.id]
        if self._flight is not None:
            self._flight.drop(request)
        self._replicas.remove(request, spoiled=spoiled)
        self._sampler.release(request)
