"""Runs the model that drafts: with part of its head, and on the cores of all ranks of the host."""

import os
from dataclasses import replace

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
        if self._cores is None:
            return self._runner.execute(plan)
        own, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, self._cores)
        torch.set_num_threads(len(self._cores))
        try:
            return self._runner.execute(plan)
        finally:
            os.sched_setaffinity(0, own)
            torch.set_num_threads(num_threads)
