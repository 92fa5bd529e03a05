"""Computes operations per token and the device's peak rate, for MFU.

Source: PaLM, appendix B (arXiv 2204.02311): 6 N + 12 L H E S operations per token, N parameters in matrix products. Attention
counts without a mask; recomputation does not count.
"""

import time

import torch

from tightwire.model.checkpoint.config import LlamaConfig

_BFLOAT16_TFLOPS = {  # vendor's dense rates; the longest key that is part of the device's name applies
    "A100": 312.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H200": 989.4,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
}
_SIDE, _TRIES = 1024, 8


def flops_per_token(config: LlamaConfig, sequence_tokens: int) -> int:
    """Operations per token of forward and backward."""
    width = config.num_heads * config.head_dim
    attention = config.hidden_size * (2 * width + 2 * config.num_kv_heads * config.head_dim)
    products = config.num_layers * (attention + 3 * config.hidden_size * config.mlp_size)
    products += config.vocab_size * config.hidden_size  # the head, tied or not; an embedding lookup has no arithmetic
    return 6 * products + 12 * config.num_layers * width * sequence_tokens


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of one device; None: not known.

    The vendor's bfloat16 rate of a GPU; the rate of a large matrix product on a CPU, measured in about 0.2 s.
    """
    if device.type == "cpu":
        return _measure(dtype)
    if dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    fitting = [known for known in _BFLOAT16_TFLOPS if known in name]
    return _BFLOAT16_TFLOPS[max(fitting, key=len)] * 1e12 if fitting else None


def _measure(dtype: torch.dtype) -> float:
    a, b = torch.rand(_SIDE, _SIDE, dtype=dtype), torch.rand(_SIDE, _SIDE, dtype=dtype)
    torch.mm(a, b)
    times = []
    for _ in range(_TRIES):
        begun = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - begun)
    return 2 * _SIDE**3 / min(times)  # the fastest try, because other programs slow the rest
