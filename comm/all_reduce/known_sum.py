"""Messages of any size with a known exact sum, made by repeating pieces of a limited number of random numbers.

Pieces begin at random places, so that a misplaced part of the result is detected. The places are multiples of every codec's
group size, so each copy of a piece is encoded alike and one error bound serves all copies.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.comm.protocols import AllReduce

_ALL_RANKS_ELEMS = 1 << 19  # random numbers of all ranks together: tens of milliseconds, tens of MiB for the bounds
_LEAST_ELEMS = 1 << 12  # the minimum for one rank, for any number of ranks
_PIECES = 4  # the random numbers are this many times as long as a piece
_GROUP_ELEMS = 128  # a multiple of every codec's group
_STEPS = 1 << 22  # steps per unit: numbers from -2 to 2, all exact in float32
_SEED = 1234


class Errors(NamedTuple):
    """``num_wrong``: elements outside the bound. ``largest``: the largest error, NaN if there is one."""

    num_wrong: int
    largest: float


class KnownSum:
    """A message of ``num_elems`` for each rank, the same on every machine.

    Cost: W random tensors of ``random_elems`` and their float64 sum; beyond that, only the caller's own message.
    """

    def __init__(self, rank: int, world_size: int, num_elems: int, dtype: torch.dtype, device: torch.device) -> None:
        most = max(_LEAST_ELEMS, _ALL_RANKS_ELEMS // world_size)
        self.num_elems = num_elems
        self.random_elems = num_random = min(num_elems, most // _GROUP_ELEMS * _GROUP_ELEMS)
        # Whole numbers made on the CPU: float and GPU generators give different numbers on different processors.
        generator = torch.Generator().manual_seed(_SEED + num_elems)
        shape = (world_size, num_random)
        steps = torch.randint(-2 * _STEPS, 2 * _STEPS, shape, generator=generator, dtype=torch.int32)
        self._inputs = list((steps / _STEPS).to(dtype).to(device).unbind())
        self._own = self._inputs[rank]
        self._exact = torch.zeros(num_random, dtype=torch.float64, device=device)
        for x in self._inputs:
            self._exact += x
        self._pieces = [slice(0, num_elems)]
        if num_elems > num_random:
            length = num_random // _PIECES // _GROUP_ELEMS * _GROUP_ELEMS
            num_places = (num_random - length) // _GROUP_ELEMS + 1
            places = torch.randint(num_places, (-(-num_elems // length),), generator=generator).tolist()
            self._pieces = [slice(start, start + length) for start in (_GROUP_ELEMS * place for place in places)]
            last = self._pieces[-1]
            self._pieces[-1] = slice(last.start, last.stop - len(places) * length + num_elems)

    @property
    def dtype(self) -> torch.dtype:
        return self._own.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elems * self._own.element_size()

    def own(self) -> Tensor:
        """This rank's message, (num_elems,), as a new tensor."""
        return torch.cat([self._own[piece] for piece in self._pieces])

    def is_own(self, x_N: Tensor) -> bool:
        """Whether ``x_N`` still equals this rank's message."""
        return all(torch.equal(part, self._own[piece]) for part, piece in self._parts(x_N))

    def errors(self, result_N: Tensor, all_reduce: AllReduce) -> Errors:
        """Compare ``result_N`` with the exact sum and with the bound ``all_reduce.max_error``.

        An element's bound must depend on its own codec group only, as in all algorithms here. Works piece by piece.
        """
        bound = all_reduce.max_error(self._inputs)
        last, last_bound = self._pieces[-1], None
        if (last.stop - last.start) % _GROUP_ELEMS:
            last_bound = all_reduce.max_error([x[last] for x in self._inputs])  # the last codec group is shorter here
        num_right, largest = [], []
        for part, piece in self._parts(result_N):
            error = part.double().sub_(self._exact[piece]).abs_()
            piece_bound = last_bound if last_bound is not None and piece is last else bound[piece]
            num_right.append((error <= piece_bound).sum())  # a NaN is never within the bound
            largest.append(error.max())
        return Errors(self.num_elems - int(torch.stack(num_right).sum()), float(torch.stack(largest).max()))

    def _parts(self, x_N: Tensor) -> Iterator[tuple[Tensor, slice]]:
        lengths = [piece.stop - piece.start for piece in self._pieces]
        return zip(x_N.split(lengths), self._pieces, strict=True)
