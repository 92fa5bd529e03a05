"""The loops of a loaded rank: rank 0 runs the engine, the others its numbered plans; one that misses a plan stops."""

import contextlib
import logging
import math
from pathlib import Path

import msgspec
import zmq

from tightwire.comm.codec.codec import parse_codec
from tightwire.model.adapters.peft import adapter_digest, open_adapter
from tightwire.model.adapters.product import AdapterProducts
from tightwire.model.build import RankGroups
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.rows import Column
from tightwire.model.sampling.sampler import Sampler
from tightwire.model.step import StepPlan
from tightwire.server.config.chunks import WARM_UP_ROWS, ChunkSizes
from tightwire.server.config.limits import BLOCK_SIZE, Limits
from tightwire.server.config.serve import EngineOptions
from tightwire.server.engine.draft_runner import DraftRunner
from tightwire.server.engine.drafts import DRAFTERS
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.lora import AdapterTable, SlotsFullError
from tightwire.server.engine.model_drafts import ModelDrafter
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc import messages
from tightwire.server.ipc.channels import Inboxes, bind_receiver, connect_sender
from tightwire.server.plan.layout_times import HIDDEN_BYTES, HIDDEN_SHARE
from tightwire.server.plan.rank_setup import RunPlan
from tightwire.server.ranks.reporter import Reporter
from tightwire.server.ranks.step_runner import RankZeroRunner, StepSize

_log = logging.getLogger(__name__)

_WARM_UP_PROMPT_TOKENS = 24
_WARM_UP_ANSWER_TOKENS = 4
_WARM_UP_MANY_KEYS = 300  # more than one chunk of ``kernels.cuda.attention_decode``


def warm_up_rounds(limits: Limits, rules: RequestRules, device: str) -> list[list[messages.AddRequest]]:
    """Requests that begin in one step: for every policy, and one that draws. On CUDA a long prompt joins them in the next
    step: one with prompts, decode rows and many keys has kernels of its own, which would be compiled in service. Then, if
    prompts pass stages, one from whose chunks the times of chunks are learned."""
    greedy = [(_WARM_UP_PROMPT_TOKENS, policy, 0.0) for policy in rules.policies]
    kinds = [[*greedy, (_WARM_UP_PROMPT_TOKENS, None, 1.0)]]
    if device == "cuda":
        kinds.append([(_WARM_UP_MANY_KEYS, None, 0.0)])
    if limits.num_stages > 1:
        kinds.append([(WARM_UP_ROWS, None, 0.0)])
    return [[_warm_up_request(limits, rules, *kind) for kind in each] for each in kinds]


def _warm_up_request(
    limits: Limits, rules: RequestRules, length: int, policy: str | None, temperature: float
) -> messages.AddRequest:
    # Leave room for two answer tokens; the second takes its own step.
    length = min(length, max(1, limits.max_model_len - 2))
    most = min(_WARM_UP_ANSWER_TOKENS, limits.max_model_len - length)
    return messages.AddRequest(
        id="",
        prompt_token_ids=[token % rules.vocab_size for token in range(1, 1 + length)],
        params=SamplingParams(max_tokens=most, temperature=temperature, top_p=0.9, seed=1, ignore_eos=True),
        allreduce=policy,
    )


class AdapterLoader:
    """Loads adapters on one rank. ``products`` is None if adapters are off."""

    def __init__(self, products: AdapterProducts | None, model: LlamaConfig, reporter: Reporter) -> None:
        self._products, self._model, self._reporter = products, model, reporter

    def load(self, message: messages.LoadSlot) -> None:
        """Load an adapter between two steps. A folder that is refused leaves the slot empty."""
        self._reporter.begin(f"loading the adapter in {message.folder}")
        refusal, digest = "this server has no adapter slots", ""
        if self._products is not None:
            try:
                adapter = open_adapter(Path(message.folder), self._model, self._products.room.max_rank)
                self._products.load(message.slot, adapter)
                refusal, digest = "", adapter_digest(Path(message.folder))
            except Exception as error:  # noqa: BLE001 - a bad folder must not end the rank
                self._products.clear(message.slot)
                refusal = str(error)
                if not isinstance(error, ModelError):
                    _log.exception("the adapter in %s cannot be loaded", message.folder)
                    refusal = f"the adapter in {message.folder} cannot be loaded: {error!r}"
        self.answer(message.id, refusal, digest)

    def answer(self, adapter: int, refusal: str, digest: str = "") -> None:
        """Tell the HTTP process what became of a ``LoadAdapter``."""
        self._reporter.send(messages.AdapterLoaded(self._reporter.rank, adapter, refusal, digest))


class Leader:
    """Rank 0: receives requests, sends steps to the followers, and returns results to the parent."""

    def __init__(
        self,
        runner: ModelRunner,
        model: LlamaConfig,
        plan: RunPlan,
        options: EngineOptions,
        groups: RankGroups,
        inboxes: Inboxes,
        reporter: Reporter,
        grammars: GrammarMasks | None = None,
        drafting: DraftRunner | None = None,
    ) -> None:
        """``inboxes``: of all ranks, this one's first. ``grammars``: None: requests with a grammar are errors. ``drafting``: the draft model."""
        self._reporter = reporter
        self._context = zmq.Context()
        self._inbox = bind_receiver(self._context, inboxes.addresses[0])
        self._decoder = msgspec.msgpack.Decoder(messages.ToEngine)
        rate = math.inf if plan.link is None else plan.link.link.bytes_per_s or math.inf
        rate *= 1.0 if plan.is_pipeline else HIDDEN_SHARE
        row_bytes = parse_codec(plan.stage_codec).wire_bytes(model.hidden_size, HIDDEN_BYTES)
        self._limits = Limits(
            max_model_len=plan.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_blocks=plan.num_blocks,
            block_size=BLOCK_SIZE,
            prefix_cache=options.prefix_cache,
            max_step_blocks=None if plan.buffer_blocks == plan.num_blocks else plan.buffer_blocks,
            groups=runner.cache.groups,
            max_parts=plan.weights.max_parts,
            num_stages=1 if plan.stages is None else plan.stages.num_stages,
            pipeline=plan.is_pipeline,
            chunks=ChunkSizes(moving_s=row_bytes / rate),
            num_policies=len(plan.policies),
        )
        self._runner = RankZeroRunner(
            runner,
            groups,
            reporter,
            [connect_sender(self._context, address, inboxes.secret) for address in inboxes.addresses[1:]],
            step_size=StepSize(options.max_num_batched_tokens, self._limits.max_step_tokens),
            num_replicas=plan.num_replicas,
        )
        self._rules = RequestRules(
            vocab_size=model.vocab_size,
            max_model_len=plan.max_model_len,
            policies=plan.policy_names,
            eos_token_ids=frozenset(model.eos_token_ids),
            has_grammars=grammars is not None,
        )
        self._drafting = drafting
        self._options, self._plan, self._loader = options, plan, AdapterLoader(runner.adapters, model, reporter)
        self._sampler = Sampler(model.vocab_size, grammars)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._runner.close()
        self._context.term()

    def warm_up(self) -> None:
        """Answer test requests on each replica to compile and allocate now. RuntimeError: one does not end normally."""
        engine, rounds = self.make_engine(), warm_up_rounds(self._limits, self._rules, self._plan.device)
        while rounds or engine.has_work():
            for replica in range(self._plan.num_replicas) if rounds else ():
                for number, request in enumerate(rounds[0]):
                    name = f"warm-up-{len(rounds)}-{replica}-{number}"
                    engine.add(msgspec.structs.replace(request, id=name), replica)
            rounds = rounds[1:]
            for output in engine.step().outputs:
                if output.finish_reason not in (None, "length"):
                    raise RuntimeError(f"the model does not answer a first request: {output.message or output}")
        self._runner.tell_followers(messages.StopFollowing())
        self._runner.end_warm_up()

    def serve(self) -> None:
        """Run steps while there is work, and sleep otherwise, until told to stop."""
        engine = self.make_engine()
        while self.take_messages(engine):
            if engine.has_work():
                self._reporter.send(engine.step())
        self._runner.tell_followers(messages.StopFollowing())

    def make_engine(self) -> Engine:
        plan, table, make = self._plan, AdapterTable(0), DRAFTERS.get(self._options.speculation)
        drafter = make and make()
        if self._drafting is not None:
            drafter = ModelDrafter(self._drafting, self._limits, self._rules.vocab_size, plan.num_replicas)
            drafter.measure()
        if drafter is not None:
            drafter.grammars = self._sampler.grammars
        if plan.adapters is not None:
            table = AdapterTable(plan.adapters.num_slots, {each.id: each.slot for each in plan.adapters.loaded})
        return Engine(
            runner=self._runner,
            sampler=self._sampler,
            limits=self._limits,
            rules=self._rules,
            drafter=drafter,
            plan_ahead=plan.plan_ahead,
            num_replicas=plan.num_replicas,
            adapters=table,
        )

    def _load_adapter(self, engine: Engine, message: messages.LoadAdapter) -> None:
        """Load an adapter on all ranks; each answers the HTTP process."""
        try:
            slot = engine.adapters.assign(message.id)
        except SlotsFullError as error:
            self._loader.answer(message.id, str(error))
            return
        load = messages.LoadSlot(id=message.id, slot=slot, folder=message.folder)
        self._runner.tell_followers(load)
        self._loader.load(load)

    def take_messages(self, engine: Engine) -> bool:
        """Pass all received messages to the engine; wait for one if there is nothing else to do."""
        if not engine.has_work():
            self._reporter.idle()
            self._inbox.poll()
        with contextlib.suppress(zmq.Again):
            while True:
                message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
                if isinstance(message, messages.AddRequest):
                    engine.add(message)
                elif isinstance(message, messages.CancelRequest):
                    engine.cancel(message.ids)
                elif isinstance(message, messages.LoadAdapter):
                    self._load_adapter(engine, message)
                elif isinstance(message, messages.UnloadAdapter):
                    engine.adapters.unload(message.id)
                elif isinstance(message, messages.Stop):
                    return False
        return True


class Follower:
    """Any other rank: runs the plans it receives, in order."""

    def __init__(self, runner: ModelRunner, model: LlamaConfig, inboxes: Inboxes, reporter: Reporter) -> None:
        self._runner, self._reporter = runner, reporter
        self._loader = AdapterLoader(runner.adapters, model, reporter)
        self._context = zmq.Context()
        self._inbox = bind_receiver(self._context, inboxes.addresses[reporter.rank], inboxes.secret)
        self._decoder = msgspec.msgpack.Decoder(messages.ToFollower)

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._context.term()

    def serve(self) -> None:
        """Run plans until rank 0 says that there are no more. RuntimeError: a plan is missing."""
        last: int | None = None
        while not isinstance(plan := self._receive(), messages.StopFollowing):
            if isinstance(plan, messages.LoadSlot):
                self._loader.load(plan)
                continue
            assert isinstance(plan, StepPlan), "masks come behind a plan that has masked rows"
            if last is not None and plan.index != last + 1:
                raise RuntimeError(f"step {plan.index} came after step {last}: plans are missing")
            last = plan.index
            self._reporter.begin("step", plan.index)
            logits_RV = self._runner.execute(plan)
            banned = b""
            if plan.sampling.column(Column.MASKED).any():
                follows = self._receive()
                assert isinstance(follows, messages.Banned), "rank 0 sends the masks of a plan next"
                banned = follows.bits
                self._reporter.begin("step", plan.index)
            self._runner.choose(plan, logits_RV, banned)
            del logits_RV  # or it would be kept while the next step makes its own

    warm_up = serve  # rank 0 ends both

    def _receive(self) -> messages.ToFollower:
        if not self._inbox.poll(0):
            self._reporter.idle()
        return self._decoder.decode(self._inbox.recv())
