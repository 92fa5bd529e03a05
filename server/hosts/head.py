"""Node 0 of several hosts: brings the others together, compares them, hears what their ranks report, and ends with them.

Node 0 listens (``Head``) and the others connect (``member``), in any order. Each names itself and its options first (HELLO)
and is refused at once if they differ. Both ends send a beat every second; silence or a closed connection ends all nodes.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tightwire.comm.link.wire import LinkFacts, network_facts
from tightwire.model.open import Checkpoint
from tightwire.server.hosts import messages
from tightwire.server.hosts.channel import Channel, LostError, accept_channels, meet
from tightwire.server.hosts.checks import facts_of, measure, merge_plans, name_node, objection_to, probe
from tightwire.server.hosts.files import ModelFiles, list_files, read_piece
from tightwire.server.hosts.place import joined, keep_probe, listen
from tightwire.server.hosts.side import SHOW_S, Joining, Side
from tightwire.server.plan.rank_setup import LayoutChoice, RunPlan
from tightwire.threads import Background


@dataclass(slots=True)
class _Node:
    hello: messages.Hello
    channel: Channel
    failures: list[str] | None = None  # of its probe
    measured: messages.Measured | None = None
    copied: float | None = None  # the share of the model that it has got from here
    opened: messages.Opened | None = None

    def describe(self) -> str:
        copies = self.copied is not None and self.opened is None
        return name_node(self.hello) + (f", which has copied {self.copied:.0%} of the model," if copies else "")


class Head(Side):
    def __init__(self, joining: Joining) -> None:
        super().__init__(joining, range(joining.place.num_nodes * len(joining.ranks)))
        self._own = joining.hello()
        self._nodes: dict[int, _Node] = {}
        self._changed = asyncio.Event()
        self._refusal: str | None = None
        self._joined = False
        self._server: asyncio.Server | None = None
        self._loop = asyncio.get_running_loop()
        self._path: asyncio.Future[Path | None] = self._loop.create_future()  # of the model
        self._files: asyncio.Future[ModelFiles] | None = None
        self._sent_s = -math.inf  # when a node last asked for a piece of the model

    @property
    def addresses(self) -> dict[int, str]:
        return {0: self._place.address} | {node: known.hello.address for node, known in self._nodes.items()}

    async def join(self) -> None:
        """Wait for all nodes, and let each connect to the others' ports. Errors as ``Hosts.join``."""
        self._hold_ports()
        listener = listen(self._place.master, self._place.port)
        self._server = await accept_channels(listener, lambda channel: self._start(self._take(channel)))
        self._start(self._beat())
        others = range(1, self._place.num_nodes)
        await self._until(lambda: [node for node in others if node not in self._nodes], "joined")
        self._joined = True
        targets = {node: (known.hello.address, known.hello.ports) for node, known in self._nodes.items()}
        targets[0] = (self._own.address, self._own.ports)
        self._tell(messages.Probe(targets))
        failures = await probe(0, targets)
        await self._until(lambda: [node for node in others if self._nodes[node].failures is None], "tried the ports")
        failures += [failure for known in self._nodes.values() for failure in known.failures or ()]
        if failures:
            ports = self._joining.facts["--port-range"]
            raise LostError(f"{'; '.join(failures)}. Open --port-range {ports} in the firewall")
        self.link = await self._measure({node: (at, ports[-1]) for node, (at, ports) in targets.items() if node})
        keep_probe(self.link)
        self._tell(messages.Network(self.link))

    async def _measure(self, targets: dict[int, tuple[str, int]]) -> LinkFacts:
        """Let one node after the other measure the network, so that no measurement disturbs another."""
        pairs, failures = await measure(0, targets)
        for number in sorted(targets)[:-1]:
            node = self._nodes[number]
            node.channel.send(messages.Measure(targets))
            await self._until(lambda number=number, node=node: [] if node.measured else [number], "probed the network")
            assert node.measured is not None, "awaited"
            pairs += node.measured.pairs
            failures += node.measured.failures
        if failures:
            raise LostError("; ".join(failures))
        return network_facts(pairs)

    def settle(self, choose: Callable[[Sequence[int]], LayoutChoice]) -> LayoutChoice:
        choice = choose([self._own.memory_bytes, *(node.hello.memory_bytes for _, node in sorted(self._nodes.items()))])
        self._loop.call_soon_threadsafe(self._tell, choice)
        return choice

    async def agree(self, checkpoint: Checkpoint, plan: RunPlan) -> RunPlan:
        """Give the model to nodes that have no copy, and wait until all nodes have opened the same one."""
        self._path.set_result(checkpoint.path)
        own = msgspec.structs.replace(self._own, facts=facts_of(checkpoint, plan))
        await self._until(lambda: [n for n, node in self._nodes.items() if node.opened is None], "opened the model")
        plans = {0: plan}
        for number, node in sorted(self._nodes.items()):
            assert node.opened is not None
            plans[number] = node.opened.plan
            hello = msgspec.structs.replace(node.hello, facts=node.opened.facts)
            if reason := objection_to(hello, own, self._place.num_nodes):
                raise ValueError(reason.replace("start the same command", "give the same files"))
        merged = merge_plans(plans)
        self._tell(messages.Run(merged))
        self._free_ports()
        return merged

    def inboxes(self, local: Sequence[str]) -> Sequence[str]:
        """The addresses of other nodes' ranks are on their nodes."""
        ranks, addresses = self._joining.ranks, self.addresses
        return [
            address if rank in ranks else self._place.inbox(rank, addresses[rank // len(ranks)])
            for rank, address in enumerate(local)
        ]

    def note_ready(self) -> None:
        self._tell(messages.Serving())
        self._listener.note_serving()

    def ask_stop(self) -> None:
        self._listener.note_stop(name_node(self._own))

    async def _send_model(self, node: _Node, message: messages.WantModel | messages.WantPiece) -> None:
        """Answer a node without a copy; the first question waits until this node has opened its own."""
        self._sent_s = time.monotonic()
        path = await asyncio.shield(self._path)
        if self._files is None:
            self._files = Background(lambda: list_files(path)).result
        files = await asyncio.shield(self._files)
        if isinstance(message, messages.WantModel):
            node.channel.send(files)
        elif path is not None:
            node.copied = files.share(message.name, message.offset)
            piece = await asyncio.to_thread(read_piece, path, files, message.name, message.offset)
            node.channel.send(messages.Piece(piece))

    def _channels(self) -> list[Channel]:
        return [node.channel for node in self._nodes.values()]

    async def _end(self, end: messages.End) -> None:
        if self._server is not None:
            self._server.close()
        await super()._end(end)

    async def _until(self, missing: Callable[[], list[int]], what: str) -> None:
        started_s, limit_s = time.monotonic(), self._joining.join_timeout_s
        while True:
            self._changed.clear()
            if self._refusal is not None:
                await asyncio.sleep(5 * SHOW_S * (len(missing()) > 1))  # nodes that are about to start hear it too
                raise ValueError(self._refusal)
            if not (absent := missing()):
                return
            num_nodes, waited_s = self._place.num_nodes, time.monotonic() - started_s
            names = ", ".join(self._nodes[n].describe() if n in self._nodes else f"node {n}" for n in absent)
            count = f"{num_nodes - len(absent)} of {num_nodes} nodes {what}; {names} missing for"
            if waited_s > limit_s and time.monotonic() - self._sent_s > limit_s:
                reaches = f"check that it reaches {joined(self._place.master, self._place.port)}"
                advice = f"start the same command there, with its own --node-rank, and {reaches}"
                raise LostError(f"{count} {waited_s:.0f} s; {advice}")
            table = f"{count} {waited_s:.0f} s of {limit_s:g} s"
            if waited_s >= SHOW_S:
                self._listener.show(table)
                self._tell(messages.Table(table))
            # Not `asyncio.wait_for`: in Python 3.11 it ignores a cancellation at the moment of the change.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHOW_S):
                    await self._changed.wait()

    async def _take(self, channel: Channel) -> None:
        try:
            hello, proven = await meet(channel, self._joining.secret)
        except LostError:  # a port scanner, or a node's probe
            await channel.close()
            return
        if not proven:
            # Who does not know the secret must not be able to end the server, or to show something in place of its answers.
            why = f"{name_node(hello)} has another shared secret, or none; give every host the same --comm-secret-file"
            if not self._joined:
                self._listener.show(why)
            await channel.end(2, why)
            return
        reason = self._refusal or objection_to(hello, self._own, self._place.num_nodes)
        before = self._nodes.get(hello.node)
        if reason is None and before is not None and before.hello.address != hello.address:
            reason = f"two hosts are node {hello.node}: {before.hello.address} and {hello.address}"
        if reason is not None:
            await channel.end(2, reason)
            if not self._joined:
                self._refusal = reason
                self._changed.set()
            return
        if before is not None:
            # Its ports were free, so the process that held them is gone, even if its connection has not ended here.
            self._lose(before, "has started again")
            await before.channel.close()
        if self._joined or self._closing:
            # Exit code 1: whoever started the node starts it again, when all nodes start again.
            await channel.end(1, f"{name_node(self._own)} ends, because a node was lost; start all nodes again")
            return
        self._nodes[hello.node] = node = _Node(hello, channel)
        self._changed.set()
        try:
            while not self._closing:
                self._hear(node, await channel.receive(self._joining.silence_s))
        except LostError as error:
            self._lose(node, str(error))

    def _lose(self, node: _Node, why: str) -> None:
        if self._closing:
            return
        if self._joined:
            self._listener.note_end(name_node(node.hello), 1, f"lost: it {why}")
        elif self._nodes.get(node.hello.node) is node:
            del self._nodes[node.hello.node]  # it may start again
            self._changed.set()

    def _hear(self, node: _Node, message: messages.Message) -> None:
        listener = self._listener
        if isinstance(message, messages.Report):
            listener.hear(message.message)
        elif isinstance(message, messages.Exited):
            listener.note_exit(message.rank, message.code)
        elif isinstance(message, messages.AskStop):
            listener.note_stop(name_node(node.hello))
        elif isinstance(message, messages.End):
            if self._joined:
                listener.note_end(name_node(node.hello), message.code, message.reason)
        elif isinstance(message, messages.Probed):
            node.failures = message.failures
        elif isinstance(message, messages.Measured):
            node.measured = message
        elif isinstance(message, messages.WantModel | messages.WantPiece):
            self._start(self._send_model(node, message))
        elif isinstance(message, messages.Opened):
            node.opened = message
        self._changed.set()
