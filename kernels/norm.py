"""Root-mean-square normalization, alone or with the residual sum before it."""

import torch
from torch import Tensor


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))``: fp32 inside, rounded to x's dtype before the weight, as Llama does."""
    x32_TD = x_TD.float()
    scale_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    return (x32_TD * scale_T1).to(x_TD.dtype) * weight_D


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual``; returns ``(rms_norm(s), s)``."""
    sum_TD = x_TD + residual_TD
    return rms_norm_reference(sum_TD, weight_D, eps), sum_TD


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm_reference(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps)
