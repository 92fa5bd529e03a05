"""The hosts of a server as the engine sees them (``Hosts``), and what the engine is told about them (``Listener``).

A server on one host has ``Hosts`` itself; of several hosts, node 0 has ``head`` and every other node ``member``. ``choose`` picks one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tightwire.comm.link.wire import LinkFacts
from tightwire.model.open import Checkpoint
from tightwire.server.ipc.messages import FromRank
from tightwire.server.plan.rank_setup import LayoutChoice, RunPlan


class Listener(Protocol):
    def show(self, table: str) -> None:
        """Show who has joined so far, in words."""

    def hear(self, message: FromRank) -> None:
        """Take a report of a rank."""

    def note_exit(self, rank: int, code: int) -> None:
        """Take the exit of a rank's process; negative codes are signals."""

    def note_serving(self) -> None:
        """All ranks of all hosts are ready."""

    def note_stop(self, node: str) -> None:
        """A signal to ``node`` asks the whole server to stop, or node 0 has stopped it."""

    def note_end(self, node: str, code: int, reason: str) -> None:
        """A node ends by itself (exit code 0), has failed or is lost (1), or refuses to start (2)."""


class Hosts:
    """The hosts of one server, from the side of one of them: the calls in the order in which the engine makes them.

    This class is the only host of its server: it has nobody to wait for or to tell.
    """

    refusal = ""  # why this host takes no requests; empty: it takes them

    def __init__(self, watched: range, link: LinkFacts | None, listener: Listener) -> None:
        """``watched``: ranks whose reports come here. ``link``: between ranks, set by ``join``; None: this host's memory."""
        self.watched, self.link, self._listener = watched, link, listener

    def node_of(self, rank: int) -> str:
        """The name of a rank's host, such as "node 1"; empty if there is only one host."""
        return ""

    async def join(self) -> None:
        """Wait for the other hosts and try the network. ValueError: refused. LostError: a host or a port is missing."""

    async def find_model(self, model: str, show: Callable[[str, float], None]) -> str:
        """What to open here in place of ``--model``: itself, or the path of a copy that is fetched from node 0 first."""
        return model

    def settle(self, choose: Callable[[Sequence[int]], LayoutChoice]) -> LayoutChoice:
        """The layout of all hosts, in seconds, outside the event loop. ``choose`` takes their memory; empty: ranks share this one's."""
        return choose(())

    async def agree(self, checkpoint: Checkpoint, plan: RunPlan) -> RunPlan:
        """The plan of all hosts, once all have opened the same model. Errors as ``join``."""
        return plan

    def inboxes(self, local: Sequence[str]) -> Sequence[str]:
        """The addresses where ranks receive their steps, by rank; ``local``: as if all were on this host."""
        return local

    def relay(self, message: FromRank) -> None:
        """Pass on what a rank of this host reports, if another host needs it."""

    def relay_exit(self, rank: int, code: int) -> None:
        """Pass on that a rank of this host has ended, if another host needs it."""

    def note_ready(self) -> None:
        """All ``watched`` ranks are ready; ``Listener.note_serving`` follows when those of all hosts are."""
        self._listener.note_serving()

    def ask_stop(self) -> None:
        """Ask the whole server to stop, because of a signal to this host; ``Listener.note_stop`` follows."""
        self._listener.note_stop("this host")

    def fail(self, code: int, reason: str) -> None:
        """Begin to end all hosts with this exit code. The first call counts."""

    async def close(self) -> None:
        """End all hosts with exit code 0 unless ``fail`` has been called; returns when they have been told."""
