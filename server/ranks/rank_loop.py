"""The loops of a loaded rank: rank 0 runs the engine and sends each step's plans to the others, which follow.

Each rank gets its replica's plan, an empty one where its replica has nothing to do. Plans are sent before rank 0 runs its
own, so that all meet in the first collective. They are ordered and numbered; a follower that sees a gap stops, because from
there on its cache would differ.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Self

import msgspec
import torch
import zmq
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.ledger.ledger import LOADING, Count
from tightwire.model.cache.offloaded_cache import OffloadedCache
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step import StepPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.config.engine import EngineOptions
from tightwire.server.config.limits import Limits
from tightwire.server.engine.drafts import NgramDrafter
from tightwire.server.engine.engine import Engine
from tightwire.server.ipc.channels import bind_receiver, connect_sender
from tightwire.server.ipc.engine_stats import CacheCount, CommCount
from tightwire.server.ipc.messages import (
    AddRequest,
    CancelRequest,
    Stop,
    StopFollowing,
    StreamForecast,
    ToEngine,
    ToFollower,
)
from tightwire.server.plan.rank_setup import RunPlan
from tightwire.server.ranks.reporter import Reporter
from tightwire.server.ranks.stream_meter import StepSize, StreamMeter

_IDLE_POLL_MS = 1000  # how often an idle rank looks up; messages wake it at once
_WARM_UP_PROMPT_TOKENS = 24
_WARM_UP_ANSWER_TOKENS = 4
_METERED_PROMPT_TOKENS = 128  # enough for products at their rate


class Leader:
    """Rank 0: requests in, steps out to the followers, results back to the parent."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        model: LlamaConfig,
        plan: RunPlan,
        options: EngineOptions,
        group: Group,
        inbox: str,
        followers: Sequence[str],
        reporter: Reporter,
        peers: PartitionPeers | None = None,
    ) -> None:
        """``peers``: the ranks that this one shares layers with, for what passes between them to be counted."""
        self._runner, self._group, self._reporter = runner, group, reporter
        self._ledgers = [group.ledger] if peers is None else [group.ledger, peers.across.ledger, peers.inside.ledger]
        least = options.max_num_batched_tokens
        self._step_size = StepSize(least, least * plan.weights.max_parts)
        self._meter = None
        if isinstance(runner.weights, StreamedWeights):
            self._meter = StreamMeter(runner.weights, self._step_size, self._other_waits_s)
        self._vocab_size, self._eos_token_ids = model.vocab_size, model.eos_token_ids
        self._arms, self._plan_ahead = plan.arms, plan.plan_ahead
        self._num_replicas = plan.num_replicas
        self._limits = Limits(
            max_model_len=plan.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_blocks=plan.num_blocks,
            block_size=options.block_size,
            prefix_cache=options.prefix_cache,
            max_drafting_seqs=options.speculative_max_seqs,
            max_step_blocks=None if plan.slot_blocks == plan.num_blocks else plan.slot_blocks,
        )
        self._drafter = None
        if options.speculation == "ngram":
            self._drafter = NgramDrafter(
                max_tokens=options.speculative_tokens, longest=options.ngram_max, shortest=options.ngram_min
            )
        self._sampler = Sampler(model.vocab_size, group.device)
        self._context = zmq.Context()
        self._inbox = bind_receiver(self._context, inbox)
        self._followers = [connect_sender(self._context, address) for address in followers]  # of ranks 1, 2, ...
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._warm_up_counts: dict[tuple[str, str, str], Count] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in (self._inbox, *self._followers):
            socket.close(linger=0)
        self._context.term()

    def warm_up(self) -> None:
        """Answer requests of its own: whatever is compiled or allocated lazily happens here.

        A greedy one by each arm, and a drawn one, from each replica.

        Raises:
            RuntimeError: the answer is not a text; serving it would be worse than not starting.
        """
        engine = self._make_engine()
        room = max(
            1, self._limits.max_model_len - 2
        )  # beside an answer of two tokens, the second from a step of its own
        prompt = [token % self._vocab_size for token in range(1, 1 + min(_WARM_UP_PROMPT_TOKENS, room))]
        for replica in range(self._num_replicas):
            for arm, temperature in [*((arm, 0.0) for arm in self._arms), (None, 1.0)]:
                name = f"warm-up-{replica}-" + ("drawn" if arm is None else f"greedy-{arm}")
                self._add_first_request(engine, name, prompt, temperature, arm, replica)
        self._answer_all(engine)
        if self._meter is not None:  # once more, and nothing else: what is compiled is, so what takes time is the work
            self._meter.forecast_from_here()
            longer = [token % self._vocab_size for token in range(100, 100 + min(_METERED_PROMPT_TOKENS, room))]
            self._add_first_request(engine, "warm-up-metered", longer, 0.0, self._arms[0])
            self._answer_all(engine)
        self._send_followers(StopFollowing())
        self._warm_up_counts = {count[:3]: count for count in self._all_counts() if count.phase != LOADING}
        self._group.ledger.forget_latencies()

    def _add_first_request(
        self, engine: Engine, name: str, prompt: list[int], temperature: float, arm: str | None, replica: int = 0
    ) -> None:
        max_tokens = min(_WARM_UP_ANSWER_TOKENS, self._limits.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=0.9, seed=1, ignore_eos=True)
        engine.add(AddRequest(id=name, prompt_token_ids=prompt, params=params, allreduce=arm), replica)

    def _answer_all(self, engine: Engine) -> None:
        while engine.has_work():
            for output in engine.step().outputs:
                if output.finish_reason not in (None, "length"):
                    raise RuntimeError(f"the model does not answer a first request: {output.message or output}")

    def serve(self) -> None:
        """Run steps while there is work, sleep while there is none; until told to stop."""
        engine = self._make_engine()
        while self._take_messages(engine):
            if engine.has_work():
                self._reporter.send(engine.step())
        self._send_followers(StopFollowing())

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor:
        """The engine's runner: this rank's part of a step of which the followers already have theirs."""
        self._reporter.begin("step", plan.index)
        run = partial(self._runner.execute, plan, chosen_R)
        logits_RV = run() if self._meter is None or not plan.token_ids else self._meter.run(run, plan)
        if logits_RV is None:  # a step that only fills the cache asks for no row
            return torch.empty(0, self._vocab_size, device=self._group.device)
        return logits_RV

    def stream_forecast(self) -> StreamForecast | None:
        """After ``warm_up``: what streaming comes to; None where nothing streams."""
        return None if self._meter is None else self._meter.forecast()

    def _make_engine(self) -> Engine:
        return Engine(
            runner=self,
            step_tokens=lambda: self._step_size.tokens,
            stream_count=lambda: None if self._meter is None else self._meter.count(),
            cache_count=self._cache_count,
            sampler=self._sampler,
            limits=self._limits,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            broadcast=self._send_plans,
            comm_counts=self._comm_counts,
            comm_spent=self._group.ledger.spent,
            arms=self._arms,
            drafter=self._drafter,
            plan_ahead=self._plan_ahead,
            num_replicas=self._num_replicas,
        )

    def _take_messages(self, engine: Engine) -> bool:
        """Hand everything that has come to the engine, waiting for it when there is nothing else to do."""
        if not engine.has_work():
            self._reporter.idle()
            while not self._inbox.poll(_IDLE_POLL_MS):
                pass
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
                if isinstance(message, AddRequest):
                    engine.add(message)
                elif isinstance(message, CancelRequest):
                    engine.cancel(message.ids)
                elif isinstance(message, Stop):
                    return False
        return True

    def _send_plans(self, plans: Sequence[StepPlan]) -> None:
        encoded = [self._encoder.encode(plan) for plan in plans] if self._followers else []
        per_replica = (1 + len(self._followers)) // self._num_replicas
        for rank, follower in enumerate(self._followers, start=1):
            follower.send(encoded[rank // per_replica])

    def _send_followers(self, message: ToFollower) -> None:
        if self._followers:
            encoded = self._encoder.encode(message)
            for follower in self._followers:
                follower.send(encoded)

    def _comm_counts(self) -> list[CommCount]:
        """The ledgers' totals since the warm-up, of what has been used since; and of loading, all."""
        counts = [now.since(self._warm_up_counts.get(now[:3])) for now in self._all_counts()]
        return [CommCount(*count) for count in counts if count.calls]

    def _all_counts(self) -> list[Count]:
        return [count for ledger in self._ledgers for count in ledger.counts()]

    def _other_waits_s(self) -> float:
        """That steps have stood still so far for other replicas' logits, and for keys and values."""
        meeting, cache = self._runner.meeting, self._cache_count()
        return (0.0 if meeting is None else meeting.waited_s) + (0.0 if cache is None else cache.waited_s)

    def _cache_count(self) -> CacheCount | None:
        cache = self._runner.cache
        return CacheCount(*cache.flow()) if isinstance(cache, OffloadedCache) else None


class Follower:
    """Any other rank: runs the plans it is sent, in order."""

    def __init__(self, runner: ModelRunner, inbox: str, reporter: Reporter) -> None:
        self._runner, self._reporter = runner, reporter
        self._context = zmq.Context()
        self._inbox = bind_receiver(self._context, inbox)
        self._decoder = msgspec.msgpack.Decoder(ToFollower)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.close(linger=0)
        self._context.term()

    def warm_up(self) -> None:
        """Follow rank 0 through its warm-up."""
        self.serve()

    def stream_forecast(self) -> None:
        """Rank 0 makes it."""

    def serve(self) -> None:
        """Run plans until rank 0 says that there will be no more.

        Raises:
            RuntimeError: a plan is missing.
        """
        last: int | None = None
        while isinstance(plan := self._receive(), StepPlan):
            if last is not None and plan.index != last + 1:
                raise RuntimeError(f"step {plan.index} came after step {last}: plans are missing")
            last = plan.index
            self._reporter.begin("step", plan.index)
            self._runner.execute(plan)

    def _receive(self) -> ToFollower:
        if not self._inbox.poll(0):
            self._reporter.idle()
            while not self._inbox.poll(_IDLE_POLL_MS):
                pass
        return self._decoder.decode(self._inbox.recv())
