"""Exchanges small values between ranks outside the engine, over a separate group."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightwire.comm.collectives.all_gather import all_gather
from tightwire.comm.group.group import Group


class Control:
    """Gathers values from all ranks. All ranks call the same methods in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.world_size = group.world_size

    def gather_numbers(self, *numbers: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks, in rank order; all pass equally many. Cost: 8 (W-1) bytes a number, one round."""
        rows = all_gather(self._group, torch.tensor(numbers, dtype=torch.float64, device=self._group.device))
        return [tuple(row.tolist()) for row in rows]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, pickled. Cost: (W-1) times the largest pickle, two rounds."""
        data = pickle.dumps(value)
        longest = int(max(length for (length,) in self.gather_numbers(len(data))))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._group.device)
        return [pickle.loads(bytes(row.cpu().numpy())) for row in all_gather(self._group, padded)]

    @contextmanager
    def failing_together(self, *expected: type[Exception]) -> Iterator[None]:
        """Raise any rank's first ``expected`` exception on all ranks, so that none waits. Cost: a ``gather``."""
        own = None
        try:
            yield
        except expected as error:
            own = error
        for error in self.gather(own):
            if error is not None:
                raise error

    def close(self) -> None:
        self._group.close()
