"""Every node but node 0: connects to node 0, obeys it, and relays what the node's ranks report."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Sequence

import msgspec

from tightwire.comm.link.wire import LinkFacts
from tightwire.model.checkpoint.header import has_copy
from tightwire.model.open import Checkpoint
from tightwire.server.hosts import messages
from tightwire.server.hosts.channel import HELLO_S, Channel, LostError, introduce, open_channel
from tightwire.server.hosts.checks import CONNECT_S, facts_of, measure, probe, why_unreachable
from tightwire.server.hosts.files import ModelFiles, fetch_files
from tightwire.server.hosts.place import joined
from tightwire.server.hosts.side import SHOW_S, Joining, Side
from tightwire.server.ipc.messages import AdapterLoaded, Failed, FromRank, Heartbeat, Ready, Stage
from tightwire.server.plan.rank_setup import LayoutChoice, RunPlan

_RETRY_S = 0.5


class Member(Side):
    def __init__(self, joining: Joining) -> None:
        super().__init__(joining, joining.ranks)
        self.refusal = f"this is node {self._place.node}; send requests to node 0 at {self._place.master}"
        self._channel: Channel | None = None
        loop = asyncio.get_running_loop()
        self._run: asyncio.Future[RunPlan] = loop.create_future()
        self._network: asyncio.Future[LinkFacts] = loop.create_future()
        self._choice = concurrent.futures.Future[LayoutChoice]()
        self._model: asyncio.Queue[ModelFiles | messages.Piece] = asyncio.Queue()

    @property
    def _head(self) -> str:
        return f"node 0 ({joined(self._place.master, self._place.port)})"

    async def join(self) -> None:
        """Connect to node 0 and wait for the other nodes. LostError: node 0 does not answer in time."""
        self._hold_ports()
        channel = await self._connect()
        self._start(self._beat())
        self._start(self._listen(channel))
        self.link = await self._network

    async def find_model(self, model: str, show: Callable[[str, float], None]) -> str:
        """The model, or if this node has no copy, the path of the one that it fetches; see ``fetch_files``."""
        if has_copy(model):
            return model

        async def ask(name: str, offset: int) -> bytes:
            self._tell(messages.WantPiece(name, offset))
            answer = await self._model.get()
            return answer.data if isinstance(answer, messages.Piece) else b""

        self._tell(messages.WantModel())
        offer = await self._model.get()
        assert isinstance(offer, ModelFiles), "the answer to WantModel"
        return str(await fetch_files(offer, ask, show))

    def settle(self, choose: Callable[[Sequence[int]], LayoutChoice]) -> LayoutChoice:
        # Without a limit: node 0 may fetch the model first. If it is lost, the node ends, and does not wait for this thread.
        return self._choice.result()

    async def agree(self, checkpoint: Checkpoint, plan: RunPlan) -> RunPlan:
        self._tell(messages.Opened(facts_of(checkpoint, plan), plan))
        agreed = await self._run
        self._free_ports()
        return agreed

    def relay(self, message: FromRank) -> None:
        if isinstance(message, Heartbeat):
            message = msgspec.structs.replace(message, latencies=[])
        if isinstance(message, Stage | Ready | Heartbeat | AdapterLoaded | Failed):
            self._tell(messages.Report(message))

    def relay_exit(self, rank: int, code: int) -> None:
        self._tell(messages.Exited(rank, code))

    def note_ready(self) -> None:
        """Wait for node 0 to say that the ranks of all nodes are ready."""

    def ask_stop(self) -> None:
        self._tell(messages.AskStop())

    def _channels(self) -> list[Channel]:
        return [] if self._channel is None else [self._channel]

    async def _connect(self) -> Channel:
        """A connection to node 0 that has taken this node's HELLO. Tries again if node 0 drops one: either may be busy."""
        started_s, limit_s = time.monotonic(), self._joining.join_timeout_s
        while True:
            try:
                self._channel = channel = await open_channel(self._place.master, self._place.port, CONNECT_S)
            except OSError as error:  # TimeoutError is one
                why = why_unreachable(error)
            else:
                try:
                    await introduce(channel, self._joining.hello(), self._joining.secret, min(HELLO_S, limit_s))
                    return channel
                except LostError as error:
                    channel.abandon()
                    why = f"it {error}"
            waited_s = time.monotonic() - started_s
            if waited_s > limit_s:
                advice = "start the same command there with --node-rank 0, and check --master-addr and the firewall"
                raise LostError(f"{self._head} could not be reached for {waited_s:.0f} s: {why}; {advice}")
            if waited_s >= SHOW_S:
                self._listener.show(f"waiting for {self._head} for {waited_s:.0f} s of {limit_s:g} s: {why}")
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, channel: Channel) -> None:
        listener = self._listener
        try:
            while True:
                message = await channel.receive(self._joining.silence_s)
                if isinstance(message, messages.Table):
                    listener.show(message.text)
                elif isinstance(message, messages.Probe):
                    self._tell(messages.Probed(await probe(self._place.node, message.targets)))
                elif isinstance(message, messages.Measure):
                    self._tell(messages.Measured(*await measure(self._place.node, message.targets)))
                elif isinstance(message, messages.Network):
                    self._network.set_result(message.link)
                elif isinstance(message, LayoutChoice):
                    self._choice.set_result(message)
                elif isinstance(message, ModelFiles | messages.Piece):
                    self._model.put_nowait(message)
                elif isinstance(message, messages.Run):
                    self._run.set_result(message.plan)
                elif isinstance(message, messages.Serving):
                    listener.note_serving()
                elif isinstance(message, messages.End):
                    if message.code == 0:
                        listener.note_stop(self._head)
                    else:
                        listener.note_end(self._head, message.code, message.reason)
                    return
        except LostError as error:
            if not self._closing:
                listener.note_end(self._head, 1, f"lost: it {error}")
