"""The MLP's activation: ``silu(gate) * up``."""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate_up_T2F: Tensor) -> Tensor:
    """``silu(gate) * up``, gate in the first half of the columns; silu is rounded to the dtype before the product."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    return swiglu_reference(gate_up_T2F)
