"""Schedules one forward and backward of a rank: requests and releases weights, collects gradients.

Forward calls blocks in order, backward in reverse. The last ``num_buffers`` blocks keep their weights from forward to
backward, the first ``num_buffers`` from backward to the next micro-batch. With ``explicit`` prefetch, the next
``num_buffers`` blocks are requested before computing one; the lane gathers each as soon as its buffer is free.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from tightwire.training.engine.gates import weight
from tightwire.training.engine.gradients import Gradients
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.units import Part, Unit, UnitPlan, Use
from tightwire.training.engine.weights import Weights


class MicroBatch:
    """State of one ``Engine.micro_batch`` or ``Engine.evaluation``; an evaluation has no backward."""

    def __init__(
        self,
        plan: UnitPlan,
        options: EngineOptions,
        weights: Weights,
        gradients: Gradients,
        anchor: Tensor,
        *,
        last: bool,
    ) -> None:
        """``last``: it is the last micro-batch of the optimizer step."""
        self.options, self.anchor = options, anchor
        self._plan, self._weights, self._gradients, self._last = plan, weights, gradients, last
        self._blocks = plan.blocks
        self._ahead = options.num_buffers if options.prefetch == "explicit" else 0
        self._in_use: list[Unit] = []  # units without gates, from their first use on
        self._made: dict[Part, Tensor] = {}  # parameters of units without gates, shared by tied modules
        self._owed: dict[int, set[Part]] = {}  # by unit without gates, parameters that await gradients
        self._awaiting: set[int] = set()  # blocks whose backward has not ended
        if self._ahead:
            for unit in plan.units:
                if unit.block is None:
                    weights.request(unit)
            self._request(range(options.num_buffers))

    def begin_block(self, unit: Unit) -> "BlockCall":
        """Wait for the weights of ``unit`` before its forward, and request those of the next blocks."""
        assert unit.block is not None
        if unit.block in self._awaiting:
            raise RuntimeError(f"{unit.name} was called twice in a micro-batch; each block is called once")
        self._weights.request(unit)
        self._request(range(unit.block + 1, unit.block + 1 + self._ahead))
        self._weights.use(unit)
        return BlockCall(self, unit)

    def end_block(self, unit: Unit, awaits_backward: bool) -> None:
        assert unit.block is not None
        if awaits_backward:
            self._awaiting.add(unit.block)
        is_among_last = unit.block >= len(self._blocks) - self.options.num_buffers
        self._weights.done(unit, keep=awaits_backward and is_among_last)

    def parameter(self, use: Use, anchor: Tensor) -> Tensor:
        """The tensor that a module computes with. ``anchor``: the gated one of its block, or ``self.anchor``."""
        unit, flat, part = use.unit, use.flat, use.part
        if unit.block is None and unit not in self._in_use:
            self._weights.use(unit)
            self._in_use.append(unit)
        values = self._weights.view(unit, flat, part)
        if not flat.trainable or not torch.is_grad_enabled():
            return values
        if unit.block is not None:
            return weight(anchor, values, lambda grad: self._gradients.add(unit, part, grad))
        if part not in self._made:
            self._owed.setdefault(unit.number, set()).add(part)
            self._made[part] = weight(anchor, values, lambda grad: self._take(unit, part, grad))
        return self._made[part]

    def backward_begins(self, unit: Unit) -> None:
        assert unit.block is not None
        self._weights.request(unit)
        before = range(unit.block - 1, unit.block - 1 - self._ahead, -1)
        self._request(block for block in before if block in self._awaiting)
        self._weights.use(unit)
        if unit.trainable is not None:
            self._gradients.begin(unit, self._last)

    def backward_ends(self, unit: Unit) -> None:
        """Called when all gradients of the block are in its buffer, before backward continues to the inputs."""
        assert unit.block is not None
        self._awaiting.remove(unit.block)
        self._weights.done(unit, keep=not self._last and unit.block < self.options.num_buffers)
        if unit.trainable is not None:
            self._gradients.end(unit, self._last)

    def leave(self) -> None:
        """Release the weights after forward and backward."""
        for unit in self._in_use:
            self._weights.done(unit, keep=True)
        if self._last or self._awaiting:
            self._weights.drop_blocks()
        self._made.clear()

    def _request(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if 0 <= block < len(self._blocks):
                self._weights.request(self._blocks[block])

    def _take(self, unit: Unit, part: Part, grad: Tensor) -> None:
        """Take a gradient of a unit without gates. The unit is complete when all used parameters have theirs."""
        self._gradients.begin(unit, self._last)
        self._gradients.add(unit, part, grad)
        owed = self._owed[unit.number]
        owed.discard(part)
        if not owed:
            self._gradients.end(unit, self._last)


class BlockCall:
    """Passes the events of one block call's gates to the micro-batch."""

    def __init__(self, micro_batch: MicroBatch, unit: Unit) -> None:
        self._micro_batch, self._unit = micro_batch, unit

    def backward_begins(self) -> None:
        self._micro_batch.backward_begins(self._unit)

    def backward_ends(self) -> None:
        self._micro_batch.backward_ends(self._unit)
