"""Two protocols: what the engine asks of the hosts of its server (``Hosts``), and what it is told about them (``Listener``).

A server on one host has ``alone``; of several hosts, node 0 has ``head`` and every other node ``member``. ``choose`` picks one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tightwire.comm.link.wire import LinkFacts
from tightwire.model.open import Checkpoint
from tightwire.server.ipc.messages import FromRank
from tightwire.server.plan.rank_setup import RunPlan


class Listener(Protocol):
    """What the engine does with news of the hosts."""

    def show(self, table: str) -> None:
        """Show who has joined so far, in words."""
        ...

    def hear(self, message: FromRank) -> None:
        """Take a report of a rank."""
        ...

    def note_exit(self, rank: int, code: int) -> None:
        """Take the exit of a rank's process; negative codes are signals."""
        ...

    def note_serving(self) -> None:
        """All ranks of all hosts are ready."""
        ...

    def note_stop(self, node: str) -> None:
        """A signal to ``node`` asks the whole server to stop, or node 0 has stopped it."""
        ...

    def note_end(self, node: str, code: int, reason: str) -> None:
        """A node ends by itself (exit code 0), has failed or is lost (1), or refuses to start (2)."""
        ...


class Hosts(Protocol):
    """The hosts of one server, from the side of one of them: the calls in the order in which the engine makes them."""

    @property
    def refusal(self) -> str:
        """Why this host takes no requests; empty if it takes them."""
        ...

    @property
    def watched(self) -> range:
        """The ranks whose reports come to this host."""
        ...

    @property
    def link(self) -> LinkFacts | None:
        """The network between the ranks, after ``join``; None: this host's memory."""
        ...

    def node_of(self, rank: int) -> str:
        """The name of a rank's host, such as "node 1"; empty if there is only one host."""
        ...

    async def join(self) -> None:
        """Wait for the other hosts and try the network. ValueError: refused. LostError: a host or a port is missing."""
        ...

    async def find_model(self, model: str, show: Callable[[str, float], None]) -> str:
        """What to open here in place of ``--model``: itself, or the path of a copy that is fetched from node 0 first."""
        ...

    async def agree(self, checkpoint: Checkpoint, plan: RunPlan) -> RunPlan:
        """The plan of all hosts, once all have opened the same model. Errors as ``join``."""
        ...

    def inboxes(self, local: Sequence[str]) -> Sequence[str]:
        """The addresses where ranks receive their steps, by rank; ``local``: as if all were on this host."""
        ...

    def relay(self, message: FromRank) -> None:
        """Pass on what a rank of this host reports, if another host needs it."""
        ...

    def relay_exit(self, rank: int, code: int) -> None:
        """Pass on that a rank of this host has ended, if another host needs it."""
        ...

    def note_ready(self) -> None:
        """All ``watched`` ranks are ready; ``Listener.note_serving`` follows when those of all hosts are."""
        ...

    def ask_stop(self) -> None:
        """Ask the whole server to stop, because of a signal to this host; ``Listener.note_stop`` follows."""
        ...

    def fail(self, code: int, reason: str) -> None:
        """Begin to end all hosts with this exit code. The first call counts."""
        ...

    async def close(self) -> None:
        """End all hosts with exit code 0 unless ``fail`` has been called; returns when they have been told."""
        ...
