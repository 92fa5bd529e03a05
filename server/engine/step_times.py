"""Keeps running totals of rank 0's time by kind of work; a sequence's times are differences of two readings.

Times are the host's. On CUDA a forward pass and its collectives are only enqueued. The host waits for the device when
it needs the sampled tokens, so ``sampling`` includes the device's remaining work. With steps planned ahead, it also
includes launching the next step.
"""

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from tightwire.comm.ledger.ledger import Spent
from tightwire.server.ipc.messages import FirstToken

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class Reading(NamedTuple):
    """Totals since start at ``at_s``. ``forward_s`` includes the collectives of ``comm``."""

    at_s: float
    forward_s: float
    sampling_s: float
    comm: Spent


class StepTimes:
    """``clock``: seconds, the same clock in all processes of the host. ``comm``: returns the ledger's totals."""

    def __init__(self, clock: Callable[[], float], comm: Callable[[], Spent]) -> None:
        self._clock, self._comm = clock, comm
        self._forward_s = self._sampling_s = 0.0

    def read(self) -> Reading:
        return Reading(self._clock(), self._forward_s, self._sampling_s, self._comm())

    def forward(self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Run ``work``, this rank's part of a forward pass."""
        start_s = self._clock()
        result = work(*args, **kwargs)
        self._forward_s += self._clock() - start_s
        return result

    def sampling(self, work: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Run ``work``, which chooses or scores tokens."""
        start_s = self._clock()
        result = work(*args, **kwargs)
        self._sampling_s += self._clock() - start_s
        return result


def first_token(scheduled: Reading, sampled: Reading) -> FirstToken:
    """The times of a sequence between its first scheduled step and its first token.

    They include other sequences' steps in between and their share of its own steps, because it waited for them.
    """
    comm_s = sampled.comm.seconds - scheduled.comm.seconds
    codec_s = None
    if sampled.comm.num_unsplit == scheduled.comm.num_unsplit:
        codec_s = sampled.comm.codec_seconds - scheduled.comm.codec_seconds
    return FirstToken(
        scheduled_s=scheduled.at_s,
        sampled_s=sampled.at_s,
        # A difference of large totals may round below zero.
        compute_s=max(0.0, sampled.forward_s - scheduled.forward_s - comm_s),
        allreduce_s=max(0.0, comm_s - (codec_s or 0.0)),
        codec_s=codec_s,
        sampling_s=sampled.sampling_s - scheduled.sampling_s,
    )
