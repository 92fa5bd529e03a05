"""The engine of ``serve`` and ``generate``: the ranks, the client that talks to them, and the failure watch."""

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections import ChainMap
from collections.abc import Awaitable
from dataclasses import replace
from typing import Self, TypeVar

from tightwire.model.open import Checkpoint
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.progress import Progress
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.channel import LostError
from tightwire.server.hosts.choose import choose_hosts
from tightwire.server.hosts.place import NotNowError
from tightwire.server.ipc.engine_client import Phase
from tightwire.server.ipc.messages import AdapterLoaded, Failed, FromRank, Ready, Stage
from tightwire.server.ipc.zmq_client import ZmqEngineClient
from tightwire.server.plan.rank_setup import RankWork
from tightwire.server.plan.run_plan import FETCH_STOPS_S, Decision, prepare
from tightwire.server.ranks.failure_detector import Watch
from tightwire.server.ranks.processes import Ranks
from tightwire.threads import Background

_log = logging.getLogger(__name__)

_WATCH_PERIOD_S = 0.25
# How long to wait, after the first sign of trouble, for the other ranks' reports, which help to find the cause.
_COLLECT_S = 0.2
_SHOW_PERIOD_S = 10.0  # between lines about hosts that wait for others
_STOP_S = 5.0  # for ranks to leave their loops when asked

_T = TypeVar("_T")


class RankFailedError(Exception):
    """A rank cannot continue, or the parent can no longer watch the ranks; the message says which and why."""


class RankedEngine:
    """N rank processes from start to end. An async context: no rank outlives it."""

    def __init__(self, config: ServeConfig, ranks: Ranks, display: Progress) -> None:
        self._config, self._ranks, self._display = config, ranks, display
        self.hosts = choose_hosts(config, ranks.place, ranks.numbers, ranks.link, self)
        self.watch = Watch(
            ChainMap(ranks.pids, dict.fromkeys(self.hosts.watched, 0)),
            rank_timeout_s=config.timeouts.rank_timeout_s,
            step_timeout_s=config.timeouts.step_timeout_s,
            forks=ranks.fork_server.pid,
            tp=config.parallel.tp,
            num_replicas=config.parallel.dp,
            node_of=self.hosts.node_of,
        )
        self._stages = dict.fromkeys(map(self.hosts.node_of, self.hosts.watched), "")  # by node
        self._shown, self._shown_s = "", 0.0
        self.stop_asked = asyncio.Event()  # by a signal to any host, or by node 0
        self.client = ZmqEngineClient(
            to_engine=ranks.inboxes[0],
            from_ranks=ranks.to_parent,
            reporters=ranks.reporters,
            max_queued_requests=config.http.max_queued_requests,
            num_ranks=config.parallel.num_ranks,
            first_rank=ranks.numbers.start,
            on_report=self.hear,
        )
        self.ready: dict[int, Ready] = {}
        self._all_ready = asyncio.Event()
        self._trouble = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ranks.on_exit(asyncio.get_running_loop(), self.note_exit)
        self._watching = asyncio.create_task(self._keep_watch(), name="watch over the ranks")
        for task in (self.client.open(), self._watching):
            task.add_done_callback(self._note_task_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_watching()
        await self.hosts.close()  # first, or other hosts would hear that a rank was killed
        self._ranks.kill()
        self.client.close()
        if self._failed.done():
            self._failed.exception()  # marks the exception as retrieved, in case nobody awaited it

    async def start(self) -> tuple[Checkpoint, Decision, Tokenizer]:
        """Open the model, decide how to run it, and tell the ranks. ValueError: the model or an option is refused.

        On several hosts, wait for the others first. RankFailedError: one is missing.
        """
        try:
            await self.guard(self.hosts.join())
            return await self._start()
        except (LostError, NotNowError) as missing:
            self.hosts.fail(1, str(missing))
            raise RankFailedError(str(missing)) from None
        except ValueError as refusal:
            self.hosts.fail(2, str(refusal))
            raise

    async def _start(self) -> tuple[Checkpoint, Decision, Tokenizer]:
        stopped = threading.Event()
        options, hosts = self._config.model, self.hosts
        model = await self.guard(hosts.find_model(options.model, self._display.stage))
        config = replace(self._config, model=replace(options, model=model))
        settled = {"stopped": stopped.is_set, "link": hosts.link, "settle": hosts.settle}
        opening = Background(lambda: prepare(config, self._display, **settled))
        try:
            checkpoint, decision = await self.guard(opening.result)
        except asyncio.CancelledError:
            stopped.set()
            opening.join(FETCH_STOPS_S)
            raise
        decision = replace(decision, plan=await self.guard(hosts.agree(checkpoint, decision.plan)))
        decision.report(self._display)
        inboxes = tuple(hosts.inboxes(self._ranks.inboxes))
        work = RankWork(location=checkpoint.location, config=self._config, plan=decision.plan, inboxes=inboxes)
        self._ranks.hand_out(work)
        self.watch.begin_loading()
        return checkpoint, decision, await Background(checkpoint.tokenizer).result

    async def wait_ready(self) -> None:
        """Wait until every rank has loaded and warmed up. RankFailedError: a rank failed first."""
        await self.guard(self._all_ready.wait())

    async def guard(self, waiting: Awaitable[_T]) -> _T:
        """The result of ``waiting``. RankFailedError: a rank failed first."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])  # for its own cleanup, such as cancelling a request

    async def stop(self) -> None:
        """Ask the ranks to end, and wait up to 5 s; the context's exit kills the rest."""
        self._stop_watching()
        self.client.stop_engine()
        await self._ranks.wait(_STOP_S)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def note_exit(self, rank: int, code: int) -> None:
        self.hosts.relay_exit(rank, code)
        self.watch.exited(rank, code)
        self._trouble.set()

    def hear(self, message: FromRank) -> None:
        self.hosts.relay(message)
        self.watch.heard(message)
        if isinstance(message, AdapterLoaded):
            self.client.heard_adapter(message)
        if isinstance(message, Failed):
            self._trouble.set()
        if isinstance(message, Stage):
            self._display.stage(message.name, message.fraction, message.rank)
            if not self.watch.serving:
                percent = f" {100 * message.fraction:.0f} %" if message.fraction else ""
                done = " done" if message.fraction == 1 else percent
                self._stages[self.hosts.node_of(message.rank)] = f"{message.name}{done}"
                known = (": ".join(filter(None, each)) for each in self._stages.items() if each[1])
                self.client.set_phase(Phase.LOADING, "; ".join(known))
        elif isinstance(message, Ready):
            self.ready[message.rank] = message
            if len(self.ready) == len(self.hosts.watched):
                self.watch.serving = True
                self.hosts.note_ready()

    def show(self, table: str) -> None:
        self.client.set_phase(Phase.LOADING, table)
        shown, now_s = re.sub(r"\d+%", "", table.partition(" for ")[0]), time.monotonic()
        if shown != self._shown or now_s - self._shown_s > _SHOW_PERIOD_S:
            self._shown, self._shown_s = shown, now_s
            self._display.say(table)

    def note_serving(self) -> None:
        self.client.set_phase(Phase.READY, self.hosts.refusal)
        self._all_ready.set()

    def note_stop(self, node: str) -> None:
        self.stop_asked.set()
        if not self._all_ready.is_set():
            self._display.say(f"{node} stopped")
            self.hosts.fail(0, "")

    def note_end(self, node: str, code: int, reason: str) -> None:
        if code == 0 and not self._all_ready.is_set():
            self.note_stop(node)
        elif code == 2:
            self._fail(ValueError(f"{node}: {reason}"))
        else:
            why = reason or "stopped"
            last = f" (last known: {self.watch.describe()})" if self.watch.serving else ""
            self._fail(RankFailedError(f"{node}: {why}{last}"))

    def _note_task_end(self, task: asyncio.Task[None]) -> None:
        """Fail if a watching task ends, because no failure would be noticed after that."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the %s broke", task.get_name(), exc_info=error)
            self._fail(RankFailedError(f"the {task.get_name()} broke: {error!r}"))

    def _fail(self, error: RankFailedError | ValueError) -> None:
        self.client.set_phase(Phase.DEAD, str(error))
        self._ranks.begin_kill()
        self.hosts.fail(2 if isinstance(error, ValueError) else 1, str(error))
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _keep_watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_PERIOD_S):
                    await self._trouble.wait()
                await asyncio.sleep(_COLLECT_S)
            if stalled := self.watch.stalled():
                self._display.say(stalled)
            reason = self.watch.check()
            if reason is not None:
                self._fail(RankFailedError(reason))
                return
