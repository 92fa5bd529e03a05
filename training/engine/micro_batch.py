"""One forward and backward of a rank: when weights are asked for, waited for and let go, and gradients taken in.

Blocks come in order, in forward and then backward. Those whose weights backward begins with are kept after forward, those
that the next micro-batch begins with after backward. ``explicit`` asks for the next ``num_buffers`` blocks before computing one:
the lane brings each as soon as its buffer is free, beside computing even where the thread that asks is the one that computes.
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
    """State from entering ``Engine.micro_batch`` to leaving it; an evaluation's too, which has no backward."""

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
        """``last``: of this optimizer step."""
        self.options, self.anchor = options, anchor
        self._plan, self._weights, self._gradients, self._last = plan, weights, gradients, last
        self._blocks = plan.blocks
        self._ahead = options.num_buffers if options.prefetch == "explicit" else 0
        self._in_use: list[Unit] = []  # without gates: from their first use on
        self._made: dict[Part, Tensor] = {}  # their parameters, once for all modules that share one
        self._owed: dict[int, set[Part]] = {}  # by unit without gates, parameters whose gradients have not come
        self._awaiting: set[int] = set()  # blocks that backward will come to
        if self._ahead:
            for unit in plan.units:
                if unit.block is None:
                    weights.request(unit)
            self._request(range(options.num_buffers))

    def begin_block(self, unit: Unit) -> "BlockCall":
        """Forward has come to ``unit``: wait for its weights."""
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
        """The parameter that a module is to compute with now. ``anchor``: of the block that the module is in."""
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
        """All gradients of the block are in its buffer, and none has flowed on."""
        assert unit.block is not None
        self._awaiting.remove(unit.block)
        self._weights.done(unit, keep=not self._last and unit.block < self.options.num_buffers)
        if unit.trainable is not None:
            self._gradients.end(unit, self._last)

    def leave(self) -> None:
        """Forward and backward are over."""
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
        """A gradient of a unit without gates. It is complete when all parameters that were given out have theirs."""
        self._gradients.begin(unit, self._last)
        self._gradients.add(unit, part, grad)
        owed = self._owed[unit.number]
        owed.discard(part)
        if not owed:
            self._gradients.end(unit, self._last)


class BlockCall:
    """One call of a block; what its gates tell."""

    def __init__(self, micro_batch: MicroBatch, unit: Unit) -> None:
        self._micro_batch, self._unit = micro_batch, unit

    def backward_begins(self) -> None:
        self._micro_batch.backward_begins(self._unit)

    def backward_ends(self) -> None:
        self._micro_batch.backward_ends(self._unit)
