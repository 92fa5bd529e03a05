"""Runs the HTTP process of ``serve``: answers at once, opens the model, decides how to run it and tells the ranks."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tightwire.comm.group.numa import describe_numbers
from tightwire.kernels.cpu.library import level
from tightwire.model.open import Checkpoint
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.parent_death import end_signals, process_age_s
from tightwire.progress import Progress
from tightwire.server.api.answer import unless
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.api.lora import Adapters
from tightwire.server.api.request_bodies import SamplingBody
from tightwire.server.api.serving import ModelHolder, ModelInfo
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.config.serve import ServeConfig
from tightwire.server.http.app import make_app, run_server
from tightwire.server.http.check_body import check_fields
from tightwire.server.http.listener import read_template, remove_socket, url_of
from tightwire.server.http.routes.observe import first_request
from tightwire.server.ipc.engine_client import Phase
from tightwire.server.ipc.messages import Ready
from tightwire.server.plan.comm_decision import describe_choices
from tightwire.server.plan.rank_setup import rank_name
from tightwire.server.plan.run_plan import Decision
from tightwire.server.ranks.processes import Ranks
from tightwire.server.ranks.ranked_engine import RankedEngine, RankFailedError
from tightwire.sizes import format_bytes

# The fields of generation_config.json that vLLM takes as well.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
# How long /health gives the reason before this process exits after a rank failure.
_LAST_WORDS_S = 1.0
# A wrapper and the terminal may each forward the same signal; a second Ctrl-C by a person takes longer.
_SAME_SIGNAL_S = 0.5
_CANCELLED_S = 2.0  # for the ends of cancelled requests to reach their clients


def serve(config: ServeConfig, listener: socket.socket, ranks: Ranks, progress: Progress) -> int:
    """Serve until a signal (exit code 0), a refusal (2) or the loss of a rank (1)."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tightwire").setLevel(config.http.log_level.upper())
    return asyncio.run(_Server(config, listener, ranks, progress).run())


class _StoppedError(Exception):
    """A signal arrived."""


class _Server:
    """One run of the server: load, serve, then drain or fail."""

    def __init__(self, config: ServeConfig, listener: socket.socket, ranks: Ranks, progress: Progress) -> None:
        self._config, self._listener, self._ranks, self._progress = config, listener, ranks, progress
        self._holder = ModelHolder()
        self._first_signal_s: float | None = None
        self._member = ranks.place is not None and ranks.place.node > 0  # does not serve the API

    async def run(self) -> int:
        self._stop = asyncio.Event()
        for number in end_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        http, adapters = self._config.http, self._config.adapters
        async with RankedEngine(self._config, self._ranks, self._progress) as engine:
            app = make_app(engine=engine.client, holder=self._holder, http=http, adapters=adapters)
            try:
                async with run_server(app, self._listener, http):
                    return await self._run(engine)
            finally:
                app.state.close()

    async def _run(self, engine: RankedEngine) -> int:
        try:
            await unless(self._until_stopped(engine), engine.guard(self._load(engine)), _StoppedError())
            await engine.guard(self._until_stopped(engine))
            return await self._drain(engine)
        except _StoppedError:
            self._progress.say("stopped before the model was ready")
            return 0
        except ValueError as refusal:
            self._progress.say(f"tightwire serve: {refusal}")
            return 2
        except RankFailedError as failure:
            self._progress.say(f"tightwire serve: {failure}")
            for of_symptoms, write in ((False, self._progress.say), (True, self._progress.detail)):
                for rank, traceback in engine.watch.tracebacks(of_symptoms=of_symptoms):
                    write(f"--- rank {rank} ---\n{traceback}")
            if self._holder.model is not None:
                await asyncio.sleep(_LAST_WORDS_S)
            return 1
        finally:
            self._progress.close()

    async def _load(self, engine: RankedEngine) -> None:
        """Load the model; returns when the engine can answer. ValueError: the model or the options are refused."""
        options = self._config.model
        checkpoint, decision, tokenizer = await engine.start()
        planned = decision.plan.adapters
        info = ModelInfo(
            name=next(iter(options.served_model_name), checkpoint.name),
            other_names=options.served_model_name[1:],
            sampling=take_defaults(self._config, checkpoint, tokenizer),
            plan=decision.plan,
            vocab_size=checkpoint.config.vocab_size,
            root=checkpoint.location,
            tp=self._config.parallel.tp,
            tp_split=self._config.parallel.tp_split,
            weights=decision.formats.name,
            kernels=level() if decision.plan.device == "cpu" else "",
            default_seed=options.seed,
            adapters=Adapters(planned.loaded if planned else ()),
        )
        if taken := next(filter(info.adapter, info.names), None):
            raise ValueError(f"--lora {taken}: the base model has this name; give another, or --served-model-name")
        self._holder.fill(info=info, tokenizer=tokenizer)
        await engine.wait_ready()
        age_s, url = process_age_s(), url_of(self._listener, self._config.http)
        if self._member:
            text = f"node ready in {age_s:.1f} s; health and metrics at {url}, the API on node 0"
        else:
            self._holder.startup_s = age_s
            self._progress.detail(describe_ranks(decision, engine.ready))
            hint = first_request(url, self._config.http, self._holder.model)
            text = f"ready in {age_s:.1f} s at {url}\n{ready_lines(info, decision, engine.ready)}\n  try        {hint}"
        self._progress.close()
        self._progress.say(text)

    async def _until_stopped(self, engine: RankedEngine) -> None:
        """Wait for a signal to this or another host. It ends all at once while they load, else node 0 after the last request."""
        try:
            await unless(self._stop.wait(), engine.stop_asked.wait(), _StoppedError())
        except _StoppedError:
            if engine.client.state.phase is Phase.LOADING:
                engine.hosts.fail(0, "")  # now: hosts whose connections end later are not lost
                return
            if self._member:
                self._progress.say("asking node 0 to stop")
            engine.hosts.ask_stop()  # ``stop_asked`` is set when all hosts stop
            await engine.stop_asked.wait()

    async def _drain(self, engine: RankedEngine) -> int:
        """Let running requests finish within the grace time, cancel the rest, and end the ranks."""
        client, grace_s = engine.client, self._config.http.shutdown_grace_s
        client.set_phase(Phase.DRAINING)
        waits = f": waiting up to {grace_s:g} s for {client.num_live} running sequences" if client.num_live else ""
        self._progress.say(f"shutting down{waits}")
        if not await engine.guard(client.wait_idle(grace_s)):
            self._progress.say(f"cancelling {client.num_live} sequences that did not finish")
            client.cancel_all()
            await engine.guard(client.wait_idle(_CANCELLED_S))
        await engine.stop()
        return 0

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._first_signal_s is None:
            self._first_signal_s = now
            self._stop.set()
        elif now - self._first_signal_s > _SAME_SIGNAL_S:
            self._ranks.kill()
            remove_socket(self._config.http)
            os._exit(128 + number)


def take_defaults(config: ServeConfig, checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, float]:
    """Compile the chat templates; return the fields of the model's generation_config.json that requests may lack. ValueError: one is refused."""
    if (flag := config.http.chat_template) is not None:
        tokenizer.use_template(read_template(flag), f"--chat-template {flag}")
    if tokenizer.chat_template is not None:
        _ = tokenizer.templates  # compiled now, so that a damaged one is refused
    names = _DEFAULTS if config.http.generation_config == "auto" else ()
    given = {name: checkpoint.generation[name] for name in names if checkpoint.generation.get(name) is not None}
    try:
        check_fields(given, SamplingBody)
        if type(limit := given.get("max_new_tokens", 1)) is not int or limit < 1:
            raise invalid(f"max_new_tokens is {limit!r:.40}, and should be a number of tokens")
    except ApiError as error:
        raise ValueError(f"generation_config.json: {error}; --generation-config none leaves it out") from None
    return given


def ready_lines(info: ModelInfo, decision: Decision, ready: Mapping[int, Ready]) -> str:
    """The model, its split, its AllReduce and its memory, for the ready message."""
    plan, budget, comm = decision.plan, decision.budget, ready[0].comm
    numbers = f"{info.weights} weights, {info.plan.dtype}" if info.weights else info.plan.dtype
    numbers += " with int8 activations" if info.plan.activations == "int8" else ""
    device = f"{plan.device} ({info.kernels} kernels)" if info.kernels else plan.device
    sums, split = "none: one rank holds the whole model", f"one rank on {device}"
    if len(ready) > 1:
        replicas = f", {plan.num_replicas} replicas of {info.tp}" if plan.num_replicas > 1 else ""
        split = f"{len(ready)} ranks on {device}{replicas}, over {comm.transport if comm else plan.transport}"
    if plan.stages is not None and plan.is_pipeline and plan.stages.ranks_each == 1:
        sums = "none: hidden states pass from stage to stage"
    elif info.tp > 1 and comm is not None:
        split += f": {' + '.join(str(shard.local_heads) for shard in decision.layout.shards)} heads"
        split += f"; {comm.link.describe(plan.num_nodes if plan.num_nodes > 1 else info.tp)}" if comm.link else ""
        sums = ("in each stage: " if plan.is_pipeline else "") + _joined(describe_choices(comm.choices))
    num_tokens = min(budget.shape.tokens(plan.num_blocks), plan.num_blocks * BLOCK_SIZE)
    memory = [f"{need} in {name}" for name, need in budget.needs()]
    memory.append(f"weights {format_bytes(sum(rank.weights for rank in budget.ranks))}")
    each = " of each replica" if plan.num_replicas > 1 else ""
    memory.append(f"{plan.kv_dtype} KV cache for {num_tokens} tokens{each}")
    if plan.adapters is not None:
        memory.append(f"adapters {', '.join(adapter.name for adapter in plan.adapters.loaded) or 'none yet'}")
    if plan.draft:
        memory.append(f"draft model {Path(plan.draft).name} {format_bytes(budget.ranks[0].draft)} on rank 0")
    if plan.weights.streamed:
        memory.append(f"{len(plan.weights.streamed)} layers stream")
    lines = [f"  model      {info.name}: {numbers}, context {info.plan.max_model_len}", f"  split      {split}"]
    lines.append(f"  AllReduce  {sums}")
    if plan.layout_note:
        lines.append(f"  layout     {plan.layout_note}")
    lines.append(f"  memory     {'; '.join(memory)}")
    if note := ready[0].note:
        lines.append(f"  graphs     {note}")
    if sampling := ", ".join(f"{name} {value:g}" for name, value in info.sampling.items()):
        lines.append(f"  sampling   {sampling}, where a request has no value of its own")
    return "\n".join(lines)


def _joined(choices: list[str]) -> str:
    """One line with the choices; the source of their times, such as "(predicted)", is named once at the end if they share it."""
    source = choices[-1][choices[-1].rfind(" (") :]
    if source.endswith(")") and all(choice.endswith(source) for choice in choices):
        return "; ".join(choice.removesuffix(source) for choice in choices) + source
    return "; ".join(choices)


def describe_ranks(decision: Decision, ready: Mapping[int, Ready]) -> str:
    """One line per rank: what it holds, and its process's peak memory."""
    shards, num_replicas = decision.layout.shards, decision.plan.num_replicas
    return "\n".join(
        f"rank {rank_name(rank, len(shards), num_replicas)}: {shard.local_heads} heads, {shard.local_kv_heads} KV heads, "
        f"{len(shard.mlp_columns)} MLP columns, {len(shard.vocab_rows)} vocabulary rows; "
        f"{format_bytes(decision.budget.ranks[rank].weights)} of weights, at most "
        f"{format_bytes(ready[rank].peak_host_bytes)} of host memory so far"
        + (f"; on cores {describe_numbers(cores)}" if (cores := ready[rank].cores) else "")
        + (f"; memory of NUMA node {', '.join(map(str, nodes))}" if (nodes := ready[rank].numa_nodes) else "")
        for rank, shard in enumerate(num_replicas * shards)
    )
