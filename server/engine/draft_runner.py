"""Runs the model that drafts: with part of its head, and on the cores of all ranks of the host."""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan


class DraftRunner:
    """A ``ModelRunner`` of one rank whose steps may give the logits of the first ids only, for fewer bytes of the head.

    Cost: with ``cores`` about 0.1 ms a step, to start the threads that a rank's own steps leave out.
    """

    def __init__(self, runner: ModelRunner, cores: set[int] | None = None) -> None:
        """``cores``: those of all ranks of this host, if the others wait while rank 0 drafts; None: the caller's own."""
        self._runner, self._outer = runner, runner.weights.outer
        self._cores = cores if cores and len(cores) > torch.get_num_threads() else None
        self.num_ids = self._outer.head.shape[0]

    def execute(self, plan: StepPlan, num_ids: int | None = None) -> Tensor | None:
        """``ModelRunner.execute``; ``num_ids``: whole sixteens, or all."""
        head, size = self._outer.head, num_ids or self.num_ids
        first = head[:size] if isinstance(head, Tensor) else head.rows(0, size)
        self._runner.weights.outer = replace(self._outer, head=first)
        own: tuple[Any, int] = os.sched_getaffinity(0), torch.get_num_threads()
        try:
            if self._cores:
                self._use(self._cores, len(self._cores))
            return self._runner.execute(plan)
        finally:
            if self._cores:
                self._use(*own)

    @staticmethod
    def _use(cores: set[int], num_threads: int) -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
