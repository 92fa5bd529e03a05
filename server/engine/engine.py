"""Turns requests into tokens on rank 0: each ``step`` runs the scheduler, the model and the sampler once.

Not thread-safe: one loop calls ``add``, ``cancel`` and ``step``, and receives the exceptions of runner and sampler.
A request that cannot run, or whose logits are not finite, ends with its own error.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from msgspec.structs import asdict, replace

from tightwire.model.sampling.draw import ALL_BANNED
from tightwire.model.sampling.sampler import Sampler
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import Drafter
from tightwire.server.engine.lora import AdapterTable
from tightwire.server.engine.pipeline import NewTokens, StepPipeline, StepRunner, StepTimes
from tightwire.server.engine.request import Reading, Request, RequestRules, make_request
from tightwire.server.engine.scheduler import Replicas
from tightwire.server.engine.step_builder import Chunk
from tightwire.server.ipc.engine_stats import EngineCounters, EngineStats
from tightwire.server.ipc.messages import AddRequest, FirstToken, Output, PromptProgress, StepResult

_log = logging.getLogger(__name__)

_NOT_FINITE = "the model's scores for this sequence are not finite numbers, so no token can be chosen"
_ALL_BANNED = "bad_words, allowed_token_ids and min_tokens together ban every next token; ban fewer tokens"
_GRAMMAR_BROKE = (
    "the grammar is too complex to continue, or allows only tokens that bad_words, allowed_token_ids or min_tokens ban"
)
_UNLOADED = "the adapter was unloaded before this request reached the engine"
_COMPILE_WAIT_S = 0.02  # of a step with nothing else to do; the loop reads new messages between steps


class Engine:
    """Owns the live requests. The pipeline owns steps; the replicas' schedulers own blocks and queues."""

    def __init__(
        self,
        *,
        runner: StepRunner,
        sampler: Sampler,
        limits: Limits,
        rules: RequestRules,
        drafter: Drafter | None = None,
        plan_ahead: bool = False,
        num_replicas: int = 1,
        adapters: AdapterTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limits``: the limits of each replica. ``plan_ahead``: launch each step before waiting for the previous one; with one replica only."""
        if plan_ahead and num_replicas > 1:
            raise ValueError(f"steps of {num_replicas} replicas cannot be planned ahead")
        self._runner, self._rules, self._drafter, self._clock, self._sampler = runner, rules, drafter, clock, sampler
        self.adapters = adapters or AdapterTable(0)
        self._counters, self._times = EngineCounters(), StepTimes(clock, runner.comm_spent)
        self._replicas = Replicas(limits, num_replicas, drafter, self._counters)
        most = limits.num_stages + 1 if limits.pipeline else 1
        given = sampler, self._replicas, self._times, self._counters
        self._pipeline = StepPipeline(runner, *given, plan_ahead=plan_ahead, most_launched=most)
        self._requests: dict[str, Request] = {}
        # Sequences that wait for their grammar, with the replica that was asked for.
        self._compiling: dict[Request, tuple[Future[Any], int | None]] = {}
        self._pending: list[Output] = []  # of requests that ended between steps
        self._begun_s: float | None = None  # when the first step since the last one with results began

    def add(self, message: AddRequest, replica: int | None = None) -> None:
        """Queue a sequence for the next step; one that cannot run gets its error then. ``replica``: None: the engine chooses."""
        if message.id in self._requests:
            # A protocol error of the sender. An error output with this id would end the running sequence.
            _log.error("request %s is already running; the second one with this id is ignored", message.id)
            return
        problem = self._rules.find_problem(message)
        if problem is not None:
            self._pending.append(Output(id=message.id, token_ids=[], finish_reason="error", message=problem))
            return
        policy = 0 if message.allreduce is None else self._rules.policies.index(message.allreduce)
        slot = self.adapters.begin(message.adapter) if message.adapter else -1
        if slot is None:
            self._pending.append(Output(id=message.id, token_ids=[], finish_reason="refused", message=_UNLOADED))
            return
        request = make_request(message, self._rules.eos_token_ids, self._clock(), policy, slot)
        if request.params.max_tokens == 0 and not request.rows_to_score(0, request.num_prompt_tokens):
            self._pending.append(_end_output(request, "length"))  # nothing to generate and nothing to score
            if request.adapter:
                self.adapters.end(request.adapter)
            return
        self._requests[request.id] = request
        if request.params.grammar:
            assert self._sampler.grammars is not None, "find_problem refuses grammars without it"
            self._compiling[request] = self._sampler.grammars.compile(request.params.grammar), replica
        else:
            self._replicas.add(request, replica)

    def cancel(self, ids: Sequence[str]) -> None:
        """End these sequences and free their blocks now; their last ``Output`` comes with the next step."""
        for request_id in ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)
                self._pending.append(Output(id=request_id, token_ids=[], finish_reason="cancelled"))

    def has_work(self) -> bool:
        """True if ``step`` would run something or has an output."""
        return bool(self._pending or self._requests)

    def step(self) -> StepResult:
        """Run one forward pass, if a sequence needs one, and return the outputs."""
        self._admit_compiled()
        outputs, self._pending = self._pending, []
        start_s, step = self._begun_s or self._clock(), self._pipeline.next()
        if step is None and self._compiling and not outputs:
            wait([future for future, _ in self._compiling.values()], _COMPILE_WAIT_S, FIRST_COMPLETED)
        if step is not None:
            new, scored, broken = self._pipeline.collect(step)
            chunks = list(step.chunks)
            self._begun_s = None if chunks else start_s  # rows that only pass a stage have no result
            if self._drafter is not None and chunks:
                self._drafter.time(chunks, self._clock() - start_s)
            outputs += self._progress(chunks)
            outputs += [self._end(request, "error", _NOT_FINITE) for request in broken]
            for request in scored:
                self._counters.num_prompt_tokens += request.num_prompt_tokens
                outputs.append(self._end(request, "length"))
            for each in new:
                if each.token_ids:
                    outputs.append(self._make_output(each))
                if each.broken:
                    params, ended = each.chunk.request.params, ("error", _NOT_FINITE)
                    if each.broken == ALL_BANNED and params.has_mask:
                        ended = "refused", _GRAMMAR_BROKE if params.grammar else _ALL_BANNED
                    outputs.append(self._end(each.chunk.request, *ended))
        return StepResult(outputs=outputs, stats=self.stats())

    def _admit_compiled(self) -> None:
        """Queue the sequences whose grammars are compiled; refuse those with an invalid one."""
        for request, (future, replica) in list(self._compiling.items()):
            if not future.done():
                continue
            if isinstance(error := future.exception(), ValueError):
                self._pending.append(self._end(request, "refused", f"the grammar is invalid: {error}"))
            elif error is not None:  # of this request alone, such as a lack of memory
                _log.error("the grammar of request %s was not compiled", request.id, exc_info=error)
                self._pending.append(self._end(request, "error", f"the grammar was not compiled: {error!r}"))
            else:
                del self._compiling[request]
                self._replicas.add(request, replica)

    def _progress(self, chunks: Iterable[Chunk]) -> Iterator[Output]:
        """One output for each request that asked to hear of its prompt, and that a step brought forward.

        Preempted requests compute a part of their prompt again; they are not reported until they are past it.
        """
        for request, start, end, *_ in chunks:
            if request.reported is None or end <= request.reported[0]:
                continue
            # Not from request.num_cached_tokens: a step planned ahead may have counted tokens after this chunk.
            computed = request.reported[1] + end - max(start, request.reported[0])
            request.reported = (end, computed) if end < request.num_prompt_tokens else None
            assert request.first_scheduled_s is not None, "a chunk before the first step"
            seconds = self._clock() - request.first_scheduled_s
            progress = PromptProgress(request.num_prompt_tokens, end - computed, computed, seconds)
            yield Output(id=request.id, token_ids=[], progress=progress)

    def stats(self) -> EngineStats:
        counts, loads = asdict(self._runner.counts()), self._replicas.loads()
        # Sequences that wait for their grammar have no replica yet; the first one counts them.
        loads[0] = replace(loads[0], num_waiting=loads[0].num_waiting + len(self._compiling))
        return EngineStats(**counts, loads=loads, counters=copy.copy(self._counters))

    def _make_output(self, new: NewTokens) -> Output:
        """The output with a step's new tokens; the sequence's last one if it stops here."""
        request, finish_reason, num_new = new.chunk.request, new.finish_reason, len(new.token_ids)
        request.num_computed += new.num_right
        self._counters.num_generation_tokens += num_new
        if new.chunk.draft and self._drafter is not None:
            self._counters.num_drafts += 1
            self._counters.num_draft_tokens += len(new.chunk.draft)
            self._counters.num_accepted_draft_tokens += new.num_right
            self._drafter.learn(request, len(new.chunk.draft), new.num_right, new.chosen)
        is_first = request.num_output_tokens == num_new
        if is_first:
            self._counters.num_prompt_tokens += request.num_prompt_tokens
        if finish_reason is not None:
            if self._drafter is not None:
                self._drafter.keep(request)
            self._forget(request)
        assert request.at_first_step is not None, "a token before the first step"
        return Output(
            id=request.id,
            token_ids=new.token_ids,
            logprobs=new.logprobs or None,
            prompt_logprobs=request.take_prompt_logprobs(),
            finish_reason=finish_reason,
            stop_token_id=new.token_ids[-1] if finish_reason == "stop" else None,
            queue_s=request.queue_s if is_first else None,
            first_token=first_token(request.at_first_step, self._times.read()) if is_first else None,
            num_cached_tokens=request.num_cached_tokens if is_first else 0,
            num_drafted=len(new.chunk.draft),
            num_right=new.num_right,
        )

    def _end(self, request: Request, finish_reason: str, message: str | None = None) -> Output:
        self._forget(request, spoiled=finish_reason == "error")
        return _end_output(request, finish_reason, message)

    def _forget(self, request: Request, *, spoiled: bool = False) -> None:
        del self._requests[request.id]
        self._begun_s = self._begun_s if self._requests else None
        if request.adapter:
            self.adapters.end(request.adapter)
        if self._compiling.pop(request, None) is not None:
            return
        self._pipeline.forget(request)
        self._replicas.remove(request, spoiled=spoiled)


def _end_output(request: Request, finish_reason: str, message: str | None = None) -> Output:
    """An end without a new token; after an echo it still has the prompt's logprobs."""
    failed = finish_reason in ("error", "refused")
    return Output(
        id=request.id,
        token_ids=[],
        prompt_logprobs=None if failed else request.take_prompt_logprobs(),
        finish_reason=finish_reason,
        message=message,
        queue_s=None if failed else request.queue_s,
    )


def first_token(scheduled: Reading, sampled: Reading) -> FirstToken:
    """The times between a sequence's first scheduled step and its first token, including other sequences' steps between."""
    comm_s = sampled.comm.seconds - scheduled.comm.seconds
    codec_s = None
    if sampled.comm.num_unsplit == scheduled.comm.num_unsplit:
        codec_s = sampled.comm.codec_seconds - scheduled.comm.codec_seconds
    return FirstToken(
        scheduled_s=scheduled.at_s,
        sampled_s=sampled.at_s,
        # A difference of large totals may round below zero.
        compute_s=max(0.0, sampled.forward_s - scheduled.forward_s - comm_s),
        allreduce_s=max(0.0, comm_s - (codec_s or 0.0)),
        codec_s=codec_s,
        sampling_s=sampled.sampling_s - scheduled.sampling_s,
    )
