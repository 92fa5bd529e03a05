"""The one host of a server that has no other: the methods of ``Head`` and ``Member``, with nobody to wait for or to tell."""

from collections.abc import Callable, Sequence

from tightwire.comm.link.wire import LinkFacts
from tightwire.model.open import Checkpoint
from tightwire.server.hosts.protocols import Listener
from tightwire.server.ipc.messages import FromRank
from tightwire.server.plan.rank_setup import RunPlan


class Alone:
    """One host with all ranks. ``link``: the emulated network between its ranks, if there is one."""

    refusal = ""

    def __init__(self, ranks: range, link: LinkFacts | None, listener: Listener) -> None:
        self.watched, self.link = ranks, link
        self._listener = listener

    def node_of(self, rank: int) -> str:
        return ""

    async def join(self) -> None:
        return

    async def find_model(self, model: str, show: Callable[[str, float], None]) -> str:
        return model

    async def agree(self, checkpoint: Checkpoint, plan: RunPlan) -> RunPlan:
        return plan

    def inboxes(self, local: Sequence[str]) -> Sequence[str]:
        return local

    def relay(self, message: FromRank) -> None:
        return

    def relay_exit(self, rank: int, code: int) -> None:
        return

    def note_ready(self) -> None:
        self._listener.note_serving()

    def ask_stop(self) -> None:
        self._listener.note_stop("this host")

    def fail(self, code: int, reason: str) -> None:
        return

    async def close(self) -> None:
        return
