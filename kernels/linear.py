"""Matrix product with the weights stored (out, in)."""

import torch.nn.functional as F
from torch import Tensor


def linear_reference(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return F.linear(x_TD, weight_OD, bias_O)


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return linear_reference(x_TD, weight_OD, bias_O)
