"""Reduces gradients: backward writes them into a buffer, the lane sums them over ranks, and each rank keeps its shard.

If ``reduce_when`` is ``backward``, blocks share two buffers and are reduced in every micro-batch; the shard accumulates
the sums. Every other unit has its own buffer, which accumulates micro-batches, and is reduced once, at the end of the
step. Sums over ranks are float32. The between-node slot (``between``) runs once per unit and step. ``finish`` divides
by the number of ranks.
"""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tightwire.comm.buffers import BufferPool
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.collectives.collectives import NONE, reduce_scatter
from tightwire.comm.collectives.node_wise import hierarchical_reduce_scatter
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.lane import Lane
from tightwire.training.engine.between import Between
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.trace import Trace
from tightwire.training.engine.units import NORMS, Flat, Part, Unit, UnitPlan
from tightwire.training.engine.weights import PATIENCE
from tightwire.training.ranks.groups import shard_group

NUM_BUFFERS = 2


@dataclass(slots=True)
class Place:
    """A unit's gradient buffer and the shard of their sums. ``in_place``: both are the same memory."""

    flat: Flat
    pool: BufferPool
    number: int
    name: str
    buffer_N: Tensor
    grad_S: Tensor
    alternates: bool
    in_place: bool
    written: set[Part] = field(default_factory=set)
    is_open: bool = False  # backward is writing to it
    has_sum: bool = False  # ``grad_S`` has a sum of this step; used by the lane
    is_last: bool = False  # no further backward may begin in this step


def alternates(options: EngineOptions, unit: Unit) -> bool:
    """Whether the unit shares its gradient buffer with others and is reduced in every micro-batch."""
    return unit.block is not None and options.sharding.reduce_when == "backward"


def lies_in_buffer(options: EngineOptions, unit: Unit, shard_ranks: int) -> bool:
    """Whether the optimizer's gradient is the buffer that backward writes."""
    return shard_ranks == 1 and options.reduce_dtype == torch.float32 and not alternates(options, unit)


def reduce_codecs(options: EngineOptions, unit: Unit) -> tuple[Codec, Codec]:
    """The codecs inside and across nodes. Norms and biases are not quantized."""
    if unit.name == NORMS:
        return NONE, NONE
    return parse_codec(options.reduce_codec), parse_codec(options.reduce_across_codec)


class Gradients:
    """Called by the computing thread; the lane reduces. ``waited_s``: seconds that the computing thread has waited."""

    def __init__(
        self,
        plan: UnitPlan,
        options: EngineOptions,
        lane_group: Group,
        trace: Trace,
        between: Between | None,
    ) -> None:
        self.waited_s = 0.0
        self._plan, self._options, self._trace, self._between = plan, options, trace, between
        self._lane_group, self._group = lane_group, shard_group(lane_group, options.sharding)
        self._patience_s = PATIENCE * lane_group.timeout_s
        self._places = self._make_places(lane_group.device)
        self._layouts: dict[int, list[tuple[int, int]]] = {}  # by shared buffer: parameters' (start, length)
        self._lane = Lane("reduce", lane_group.device, self._close_pools)

    def grad(self, unit: Unit) -> Tensor:
        """(N / ranks,) float32: this rank's shard of the unit's gradient; valid from ``finish`` to the next step."""
        return self._places[unit.number].grad_S

    def begin(self, unit: Unit, last: bool) -> None:
        """Wait until backward may write ``unit``'s gradients to its buffer. ``last``: the step's last micro-batch."""
        place = self._places[unit.number]
        if place.is_last:
            raise RuntimeError(
                f"gradients of {unit.name} come after they were handed over; run one backward in a micro-batch, and say "
                "which micro-batch is the last"
            )
        place.is_open = True
        if not place.alternates and place.written:
            return  # it holds the buffer since an earlier micro-batch
        start_s = time.perf_counter()
        place.pool.fill(unit.number, place.number, self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        self._trace.begin("write", unit.name, place.name)
        place.written.clear()
        if place.alternates:
            layout = [(part.start, part.num_elems) for part in place.flat.parts]
            if self._layouts.get(place.number) != layout:
                place.buffer_N.zero_()  # padding between parameters holds values of another unit
                self._layouts[place.number] = layout
            place.is_last = last
            self._lane.start(lambda: self._reduce(unit, place, last))

    def add(self, unit: Unit, part: Part, grad: Tensor) -> None:
        """Write a parameter's gradient to the unit's buffer, or add it if the parameter has one there."""
        place = self._places[unit.number]
        if not place.is_open:
            raise RuntimeError(f"a gradient of {part.name} came outside of the backward of {unit.name}")
        target = part.of(place.buffer_N)
        if part in place.written:
            target.add_(grad)
        else:
            target.copy_(grad)
            place.written.add(part)

    def end(self, unit: Unit, last: bool) -> None:
        """Backward has written all of ``unit``'s gradients of this micro-batch."""
        place = self._places[unit.number]
        place.is_open = False
        if not place.alternates and not last:
            return
        for part in place.flat.parts:
            if part not in place.written:
                part.of(place.buffer_N).zero_()
        self._trace.end("write", unit.name, place.name)
        place.pool.filled(unit.number)
        if not place.alternates:
            place.is_last = True
            self._lane.start(lambda: self._reduce(unit, place, last=True))

    def end_step(self) -> None:
        """Called after the last micro-batch: reduce, in plan order, the units that backward has not completed."""
        for unit in self._units():
            place = self._places[unit.number]
            if place.is_last:
                continue
            if place.alternates:
                place.is_last = True
                self._lane.start(lambda unit=unit, place=place: self._complete(unit, place))
            else:
                if not place.written:
                    self.begin(unit, last=True)
                self.end(unit, last=True)

    def finish(self) -> None:
        """Wait until all gradients are summed, then divide them by the number of ranks.

        Raises:
            RuntimeError: the step's last micro-batch has not run.
        """
        if not all(place.is_last for place in self._places.values()):
            raise RuntimeError("gradients are not complete before a micro-batch that is the step's last; say last=True")
        start_s = time.perf_counter()
        self._lane.finish(self._patience_s)
        self.waited_s += time.perf_counter() - start_s
        for unit in self._units():
            place = self._places[unit.number]
            place.grad_S.div_(self._lane_group.world_size)
            place.has_sum = place.is_last = False
            place.written.clear()
        if self._between is not None:
            self._between.step_done()

    def close(self, reason: BaseException) -> None:
        self._close_pools(reason)
        self._lane.close()

    def _reduce(self, unit: Unit, place: Place, last: bool) -> None:
        place.pool.use(unit.number, math.inf)  # the thread that waits for the lane has a deadline
        with self._trace.span("reduce", unit.name, place.name):
            if not place.in_place:
                self._add_sum(unit, place)
            place.has_sum = True
            if place.in_place:
                self._complete(unit, place)
        place.pool.release(unit.number)
        if last and not place.in_place:
            self._complete(unit, place)
        for pool in self._pools():
            pool.moved()

    def _add_sum(self, unit: Unit, place: Place) -> None:
        """Add the reduced sum to the shard. Separate, so that the sum is freed before the slot allocates."""
        sum_S = self._sum(unit, place.buffer_N)
        place.grad_S.add_(sum_S) if place.has_sum else place.grad_S.copy_(sum_S)

    def _sum(self, unit: Unit, grad_N: Tensor) -> Tensor:
        """This rank's slice of the sum over the shard group, float32."""
        inside, across = reduce_codecs(self._options, unit)
        group, dtype = self._group, torch.float32
        if group.nodes is not None and self._options.reduce_path == "hierarchical":
            return hierarchical_reduce_scatter(group, grad_N, inside, across, dtype)
        return run_leg(self._lane_group, group, reduce_scatter, group, grad_N, inside, dtype)

    def _complete(self, unit: Unit, place: Place) -> None:
        """Sum over replicas, once the shard has the sum of all micro-batches."""
        if not place.has_sum:
            place.grad_S.zero_()
        if self._between is not None:
            place.grad_S.copy_(self._between(unit.name, place.grad_S))

    def _make_places(self, device: torch.device) -> dict[int, Place]:
        options, ranks, size = self._options, self._plan.shard_ranks, self._options.reduce_dtype.itemsize
        room = max((unit.trainable.num_elems for unit in self._plan.blocks if unit.trainable), default=0)
        shared = BufferPool(NUM_BUFFERS, room * size, device) if options.sharding.reduce_when == "backward" else None
        places = {}
        for unit in self._units():
            flat = unit.trainable
            assert flat is not None
            alternating = shared is not None and alternates(options, unit)
            number = (unit.block or 0) % NUM_BUFFERS if alternating else 0
            pool = shared if alternating else BufferPool(1, flat.num_elems * size, device)
            assert pool is not None
            buffer_N = pool.buffers[number].memory.view(options.reduce_dtype)[: flat.num_elems]
            if not alternating:
                buffer_N.zero_()
            in_place = lies_in_buffer(options, unit, ranks)
            grad_S = buffer_N if in_place else torch.zeros(flat.num_elems // ranks, device=device)
            name = f"gradients {number if alternating else unit.name}"
            places[unit.number] = Place(flat, pool, number, name, buffer_N, grad_S, alternating, in_place)
        return places

    def _units(self) -> list[Unit]:
        return [unit for unit in self._plan.units if unit.trainable is not None]

    def _pools(self) -> list[BufferPool]:
        return list({id(place.pool): place.pool for place in self._places.values()}.values())

    def _close_pools(self, reason: BaseException) -> None:
        for pool in self._pools():
            pool.close(reason)
