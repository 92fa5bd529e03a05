"""Relative error of a quantized AllReduce, measured on numbers like a Llama's activations."""

import torch

from tightwire.comm.codec.codec import Codec

_ROWS, _ROW_ELEMS, _SEED = 8, 4096, 7
_OUTLIER_SHARE, _OUTLIER_SCALE = 0.008, 20.0
_MAX_RANKS = 8  # more ranks do not change a relative error


def relative_rms_error(reduce_codec: Codec, gather_codec: Codec, num_ranks: int) -> float:
    """RMS of (result - exact sum) over RMS of the exact sum, for a two-shot sum with these codecs on its two legs.

    The numbers are Gaussian, with 0.8 % of the channels about 20 times as large, the same channels on every rank.
    Outliers like these are hard for a group's shared scale. Rounding to the model's dtype is not counted. Cost: a few
    milliseconds, on the CPU.
    """
    if reduce_codec.exact and gather_codec.exact:
        return 0.0
    generator = torch.Generator().manual_seed(_SEED)
    channel_scales = torch.ones(_ROW_ELEMS)
    outliers = torch.randperm(_ROW_ELEMS, generator=generator)[: round(_OUTLIER_SHARE * _ROW_ELEMS)]
    channel_scales[outliers] = _OUTLIER_SCALE * torch.exp(0.5 * torch.randn(len(outliers), generator=generator))
    exact, received = torch.zeros(_ROWS * _ROW_ELEMS), torch.zeros(_ROWS * _ROW_ELEMS)
    for _ in range(min(num_ranks, _MAX_RANKS)):
        part = (torch.randn(_ROWS, _ROW_ELEMS, generator=generator) * channel_scales).view(-1)
        exact += part
        received += _through(reduce_codec, part)
    error = _through(gather_codec, received) - exact
    return float(error.square().mean().sqrt() / exact.square().mean().sqrt())


def _through(codec: Codec, x_N: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x_N), x_N.numel(), x_N.dtype)
