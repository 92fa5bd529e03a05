"""Waits in the HTTP process until every rank has loaded a LoRA adapter."""

import asyncio
from collections.abc import Callable

from tightwire.server.ipc.engine_client import AdapterRefusedError, EngineUnavailableError, RankSilentError
from tightwire.server.ipc.messages import AdapterLoaded, LoadAdapter, UnloadAdapter

# Ranks load between two steps, which may take long, from a disk that may be slow.
_PATIENCE_S = 300.0


class AdapterLoads:
    """``send`` sends to rank 0; call ``heard`` with each rank's answer."""

    def __init__(
        self, num_ranks: int, send: Callable[[LoadAdapter | UnloadAdapter], None], patience_s: float = _PATIENCE_S
    ) -> None:
        self._num_ranks, self._send, self._patience_s = num_ranks, send, patience_s
        self._waiting: dict[int, tuple[set[int], asyncio.Future[None]]] = {}

    async def load(self, adapter: int, folder: str) -> None:
        """See ``EngineClient.load_adapter``. A load that fails on one rank is undone on all."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        missing = set(range(self._num_ranks))
        self._waiting[adapter] = missing, done
        loaded = False
        try:
            self._send(LoadAdapter(id=adapter, folder=folder))
            await asyncio.wait_for(done, self._patience_s)
            loaded = True
        except TimeoutError:
            raise RankSilentError(
                f"{', '.join(f'rank {rank}' for rank in sorted(missing))} did not load the adapter within "
                f"{self._patience_s:g} s; /health shows the state of the ranks"
            ) from None
        finally:
            del self._waiting[adapter]
            if not loaded:
                self._send(UnloadAdapter(id=adapter))

    def heard(self, answer: AdapterLoaded) -> None:
        """Note a rank's answer. Answers to abandoned loads are ignored."""
        if answer.id not in self._waiting:
            return
        missing, done = self._waiting[answer.id]
        missing.discard(answer.rank)
        if done.done():
            return
        if answer.refusal:
            done.set_exception(AdapterRefusedError(answer.refusal))
        elif not missing:
            done.set_result(None)

    def fail(self, reason: str) -> None:
        """End all loads with an error: the engine died."""
        for _, done in self._waiting.values():
            if not done.done():
                done.set_exception(EngineUnavailableError(reason))
