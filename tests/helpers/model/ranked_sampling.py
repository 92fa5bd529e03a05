"""Choosing tokens from whole rows of logits as ranks do that have some columns each, every rank a thread."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.sampling.rows import SampleRows
from tightwire.model.sampling.sampler import Choice, Sampled, Sampler, Wanted

_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _hash(state: int) -> int:
    """Splitmix64 in Python integers."""
    x = (state + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def reference_noise(seed: int, position: int, token_id: int) -> float:
    """Gumbel noise in float64."""
    stream = _hash((_hash(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK)
    uniform = ((_hash((stream + token_id * 0x9E3779B97F4A7C15) & _MASK) & _MASK >> 1) + 0.5) * 2.0**-63
    return -np.log(-np.log1p(-uniform))


class SharedGather:
    """One collective of threads, and the bytes of each call."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier, self._given = threading.Barrier(num_ranks), [torch.empty(0)] * num_ranks
        self.message_bytes: list[int] = []

    def __call__(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x
        self._barrier.wait(30)
        given = list(self._given)
        assert len({(each.shape, each.dtype) for each in given}) == 1
        if rank == 0:
            self.message_bytes.append(x.nbytes)
        self._barrier.wait(30)
        return given


def choose_alone(logits_RV: Tensor, rows: SampleRows, banned: bytes = b"") -> Tensor:
    """The results of a single rank."""
    vocab_size = logits_RV.shape[1]
    chooser = TokenChooser([range(vocab_size)], 0, logits_RV.device, lambda x, phase: [x])
    return chooser.choose(logits_RV, rows, banned)


class RankedSampler(Sampler):
    """``sample`` chooses on ranks whose columns begin at 0 and at each of ``cuts``, and holds that all get the same."""

    def __init__(
        self, vocab_size: int, device: str = "cpu", cuts: Sequence[int] = (), by_row: bool | None = None, **options: Any
    ) -> None:
        """``by_row``: None: as on ``device``; False on a CPU: as on a GPU."""
        super().__init__(vocab_size, **options)
        bounds = [0, *cuts, vocab_size]
        self.vocab_rows = [range(*pair) for pair in pairwise(bounds)]
        self._device, self.gather = torch.device(device), SharedGather(len(self.vocab_rows))
        self.choosers = [self._make_chooser(rank) for rank in range(len(self.vocab_rows))]
        if by_row is not None:
            for chooser in self.choosers:
                chooser._by_row = by_row

    def _make_chooser(self, rank: int) -> TokenChooser:
        return TokenChooser(self.vocab_rows, rank, self._device, lambda x, phase: self.gather(rank, x))

    def sample(self, logits_RV: Tensor, rows: Sequence[Any]) -> Sampled:
        return self.answer(logits_RV, [Wanted(row) for row in rows])

    def answer(self, logits_RV: Tensor, wanted: Sequence[Wanted]) -> Sampled:
        rows, banned = self.rows(wanted), self.banned(wanted)
        parts = [logits_RV[:, own.start : own.stop] for own in self.vocab_rows]
        if len(parts) == 1:
            return Choice(self.choosers[0].choose(logits_RV, rows, banned), [rows]).wait()
        with ThreadPoolExecutor(len(parts)) as threads:
            work = zip(self.choosers, parts, strict=True)
            results = list(threads.map(lambda pair: pair[0].choose(pair[1], rows, banned), work))
        assert all(torch.equal(other, results[0]) for other in results[1:])
        return Choice(results[0], [rows]).wait()
