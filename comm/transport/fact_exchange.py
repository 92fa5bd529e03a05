"""Shares small facts between ranks over the store that they join through, so that all ranks decide alike."""

from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, name_ranks


class FactExchange:
    """Shares small facts between ranks over a store, so that all decide alike."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout_s = store, timeout_s

    def share(self, topic: str, fact: bytes) -> list[bytes]:
        """Return all ranks' facts on ``topic`` in rank order. Each topic can be shared once.

        Raises:
            CollectiveTimeoutError: some ranks did not share in time; names them.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], fact)  # pyright: ignore[reportArgumentType]: bytes are taken too
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveTimeoutError(
                f"rank {self.rank} waited {self._timeout_s:g} s for peer memory ({topic}); {name_ranks(absent)} of "
                f"{self.world_size} did not arrive",
                absent,
            ) from error
        return [self._store.get(key) for key in keys]

    def first_objection(self, topic: str, objection: str | None) -> str | None:
        """Return the objection of the lowest rank that has one, or None."""
        objections = [told.decode() for told in self.share(topic, (objection or "").encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(objections) if text), None)
