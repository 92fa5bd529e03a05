"""All logits of a step on rank 0. The product has no use for them together: ranks choose tokens from their own columns."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.comm.collectives.all_gather import all_gather
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan


def whole_logits(runner: ModelRunner, plan: StepPlan) -> Tensor | None:
    """Run a step and gather the columns of all ranks; None on the others and without rows."""
    logits_RV, group = runner.execute(plan), runner._model.parallel._group
    if logits_RV is None or group.world_size == 1:
        return logits_RV
    widths = [int(width) for (width,) in group.gather_numbers([logits_RV.shape[1]])]
    padded_RV = F.pad(logits_RV, (0, max(widths) - logits_RV.shape[1]))
    parts = all_gather(group, padded_RV, phase=plan.phase, site="logits")
    if group.rank != 0:
        return None
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
