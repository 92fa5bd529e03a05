"""An engine without a model: it says what its script says, and remembers what it was asked.

With it, a byte tokenizer, and an app on a real socket, everything about HTTP is tested without ranks or weights.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from msgspec import structs
from tokenizers import AddedToken

from tightwire.comm.ledger.ledger import Count, Latency
from tightwire.comm.ledger.recording import Event, RankEvents
from tightwire.comm.policy.rules import Policy
from tightwire.model.adapters.peft import adapter_digest
from tightwire.model.sampling.parameters import TokenScore
from tightwire.model.text.tokenizer import BOS, BOS_ID, CHAT_TEMPLATE, END_OF_TURN_ID, Tokenizer, byte_backend
from tightwire.server.api.serving import ModelHolder, ModelInfo
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.app import make_app
from tightwire.server.ipc.engine_client import (
    AdapterRefusedError,
    EngineClient,
    EngineState,
    EngineUnavailableError,
    Phase,
    QueueFullError,
)
from tightwire.server.ipc.engine_stats import EngineCounters, EngineStats, ReplicaLoad
from tightwire.server.ipc.messages import (
    AddRequest,
    CommSetup,
    FirstToken,
    Output,
    PromptProgress,
)
from tightwire.server.plan.rank_setup import NamedPolicy, RunPlan

VOCAB_SIZE = 304
PLAN = RunPlan(
    device="cpu",
    dtype="bfloat16",
    sum_dtype="bfloat16",
    allreduce="native",
    transport="none",
    max_model_len=256,
    num_blocks=64,
    policies=(NamedPolicy("native", Policy(())),),
)
INFO = ModelInfo(name="tiny", plan=PLAN, vocab_size=VOCAB_SIZE, tp=2, created=1_700_000_000)


def planned(info: ModelInfo = INFO, policies: Sequence[str] = (), **changes: Any) -> ModelInfo:
    """``info`` with another plan. ``policies``: the names of its policies, if they change."""
    if policies:
        changes["policies"] = tuple(NamedPolicy(name, Policy(())) for name in policies)
    return replace(info, plan=structs.replace(info.plan, **changes))


def byte_tokenizer(*, chat: bool = True, template: str = CHAT_TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, so that tests can count tokens by looking at the text. ``special``: more special tokens."""
    backend = byte_backend(VOCAB_SIZE)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(
        backend,
        chat_template=template if chat else None,
        special_tokens={"bos_token": BOS},
        bos_token_id=BOS_ID,
        eos_token_ids=(END_OF_TURN_ID,),
    )


def says(text: str) -> Callable[[AddRequest], list[int]]:
    """A script: these bytes, then the end token."""
    return lambda request: [*text.encode(), END_OF_TURN_ID]


@dataclass(kw_only=True)
class FakeEngine:
    """Implements ``EngineClient``. One output per token; the fields make it slow, full, loading or mortal."""

    script: Callable[[AddRequest], list[int]] = field(default_factory=lambda: says("Hello, world."))
    state: EngineState = field(default_factory=lambda: EngineState(phase=Phase.READY))
    full: bool = False
    dies_after: int | None = None  # outputs
    gives_up: str | None = None  # ends each sequence with this finish reason in place of its first token
    hangs_after: int | None = None  # outputs; then nothing comes until the stream is closed
    token_s: float = 0.0
    tells_times: bool = True
    num_cached_tokens: int = 0  # of each prompt
    chunk_tokens: int = 256  # of a prompt's step, for ``progress``
    submitted: list[AddRequest] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    num_outputs: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    comm_setup: CommSetup | None = None
    comm_latencies: Sequence[Latency] = (Latency("all_reduce", "native", "decode", 3.0, 9.0),)
    recordings: list[float] = field(default_factory=list)
    adapters: dict[int, str] = field(default_factory=dict)  # folders of the loaded ones, by id
    adapter_refusal: str = ""

    async def record_collectives(self, seconds: float) -> list[RankEvents]:
        if self.state.phase is not Phase.READY:
            raise EngineUnavailableError(self.state.reason)
        self.recordings.append(seconds)
        event = Event("all_reduce", "native", "decode", "", 7, 1152, 1152, 1152, 2.0, 0.001)
        return [RankEvents(rank=rank, clock="host", events=[event]) for rank in range(2)]

    async def load_adapter(self, adapter: int, folder: str) -> str:
        if self.adapter_refusal:
            raise AdapterRefusedError(self.adapter_refusal)
        self.adapters[adapter] = folder
        return adapter_digest(Path(folder))

    def unload_adapter(self, adapter: int) -> None:
        del self.adapters[adapter]

    @property
    def stats(self) -> EngineStats:
        calls = self.num_outputs
        return EngineStats(
            loads=[
                ReplicaLoad(
                    num_running=len(self.live),
                    num_waiting=0,
                    num_blocks=10,
                    num_free_blocks=10 - min(10, len(self.live)),
                )
            ],
            counters=EngineCounters(
                num_steps=calls,
                num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self.submitted),
                num_generation_tokens=calls,
                num_prefix_queried_tokens=100,
                num_prefix_hit_tokens=40,
                num_drafts=10,
                num_draft_tokens=30,
                num_accepted_draft_tokens=20,
                num_steps_ahead=6,
            ),
            comm=[
                Count(
                    "all_reduce", "native", "decode", calls * 4, calls * 1000, calls * 1500, calls * 1e-6, calls * 500
                )
            ],
        )

    async def submit(self, requests: Sequence[AddRequest]) -> AsyncGenerator[Output, None]:
        if self.state.phase is not Phase.READY:
            raise EngineUnavailableError(self.state.reason)
        if self.full:
            raise QueueFullError("2 sequences wait or run; try again later")
        self.submitted += requests
        streams = {request.id: self._outputs(request) for request in requests}
        self.live |= set(streams)
        try:
            while streams:
                for id_ in list(streams):
                    await self._pace()
                    output = self._end(id_, "cancelled") if id_ in self.cancelled else next(streams[id_])
                    if output.finish_reason is not None:
                        del streams[id_]
                        self.live.discard(id_)
                    self.num_outputs += 1
                    yield output
        finally:
            self.cancelled |= set(streams)
            self.live -= set(streams)

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled |= set(ids)

    async def _pace(self) -> None:
        await asyncio.sleep(self.token_s)
        if self.num_outputs == self.dies_after:
            self.state = EngineState(phase=Phase.DEAD, reason="rank 1 was killed")
            raise EngineUnavailableError("the engine died: rank 1 was killed")
        if self.num_outputs == self.hangs_after:
            self.hanging.set()
            await asyncio.Event().wait()

    def _outputs(self, request: AddRequest) -> Iterator[Output]:
        if self.gives_up is not None:
            yield self._end(request.id, self.gives_up)
            return
        if request.progress:
            yield from self._progress(request)
        params = request.params
        ids = self.script(request)
        for position, token_id in enumerate(ids, start=1):
            stops = token_id in params.stop_token_ids or (token_id == END_OF_TURN_ID and not params.ignore_eos)
            reason = "stop" if stops else "length" if position in (params.max_tokens, len(ids)) else None
            first = position == 1
            yield Output(
                id=request.id,
                token_ids=[token_id],
                logprobs=None if params.logprobs is None else [_logprob(token_id, params.logprobs)],
                prompt_logprobs=self._prompt_logprobs(request) if first else None,
                finish_reason=reason,
                stop_token_id=token_id if stops else None,
                queue_s=0.001 if first else None,
                first_token=_first_token() if first and self.tells_times else None,
                num_cached_tokens=self.num_cached_tokens if first else 0,
            )
            if reason is not None:
                return

    def _progress(self, request: AddRequest) -> Iterator[Output]:
        total, done = len(request.prompt_token_ids), self.num_cached_tokens
        while done < total:
            done = min(total, done + self.chunk_tokens)
            computed = done - self.num_cached_tokens
            progress = PromptProgress(total, self.num_cached_tokens, computed, seconds=computed / 8)
            yield Output(id=request.id, token_ids=[], progress=progress)

    def _prompt_logprobs(self, request: AddRequest) -> list[TokenScore | None] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        return [None, *(_logprob(token_id, count) for token_id in request.prompt_token_ids[1:])]

    def _end(self, id_: str, reason: str) -> Output:
        return Output(id=id_, token_ids=[], finish_reason=reason, message="out of blocks")


def _first_token() -> FirstToken:
    now_s = time.monotonic()
    return FirstToken(now_s, now_s, compute_s=0.0, allreduce_s=0.0, codec_s=0.0, sampling_s=0.0)


def _logprob(token_id: int, num_top: int) -> TokenScore:
    """The chosen token is the second likeliest, after its neighbour."""
    neighbour = (token_id + 1) % 256
    top = [(neighbour, -0.5), (token_id, -1.0), *((i, -9.0) for i in range(num_top))]
    return TokenScore(token_id=token_id, logprob=-1.0, rank=2, top=top[:num_top])


def app_for(
    engine: EngineClient,
    *,
    chat: bool = True,
    loaded: bool = True,
    http: HttpOptions | None = None,
    info: ModelInfo = INFO,
    adapters: AdapterOptions | None = None,
    template: str = CHAT_TEMPLATE,
    special: Sequence[str] = (),
) -> FastAPI:
    holder = ModelHolder()
    if loaded:
        holder.fill(info=info, tokenizer=byte_tokenizer(chat=chat, template=template, special=special))
    return make_app(engine=engine, holder=holder, http=http or HttpOptions(), adapters=adapters)


def client_of(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    """A client that calls the app without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", **options)


@contextmanager
def serve(app: FastAPI) -> Iterator[str]:
    """The app on a free port, in a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline_s, "the test server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive(), "the test server did not stop"
