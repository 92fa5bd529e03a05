"""Computes random weights as hashes of (seed, tensor name, row, column), so the bits do not depend on the split."""

import math
import zlib

import torch
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import growth_of, row_chunks, store_rows
from tightwire.model.checkpoint.tensors import expected_tensors

# Llama's initialization, which keeps activations in range at any depth.
_STD = 0.02
_INT32 = 2**32


class RandomReader:
    """``CheckpointReader`` of random weights: norms are 1, all other numbers are uniform with std 0.02."""

    def __init__(self, config: LlamaConfig, seed: int) -> None:
        self._shapes = dict(expected_tensors(config))
        self._seed, self._norm_offset = seed, config.norm_offset

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"tensor {name} is not part of this model")
        return self._shapes[name]

    def stored_as(self, name: str) -> str:
        return "random"

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        shape = self.shape(name)
        if isinstance(out, Tensor) and name.endswith("norm.weight"):
            out.fill_(1.0 - self._norm_offset)
            return
        key = zlib.crc32(name.encode()) ^ (self._seed * 0x9E3779B1 % _INT32)
        is_bias = len(shape) == 1  # computed as the first column of a matrix
        columns = columns or range(1 if is_bias else shape[-1])
        # 8 bytes per number, because the hash and its float copy exist at the same time.
        # A GPU takes longer to launch the operations of a small piece than to run them.
        growth = 1 if out.device.type == "cuda" else max(growth_of(out), 4)
        for chunk in row_chunks(rows, 8 * len(columns) * growth):
            piece = _uniform(key, chunk, columns, out.device)
            store_rows(out, chunk.start - rows.start, piece.squeeze(1) if is_bias else piece, name)


def _uniform(key: int, rows: range, columns: range, device: torch.device) -> Tensor:
    """Return (rows, columns) float32 in +-sqrt(3) std. All steps but the last two are exact integer operations."""
    row_R = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=device)
    # The 64-bit product gives each row a distant start; ``int`` keeps the low 32 bits, which ``_mix`` takes.
    row_R1 = _mix((row_R * 0x85EBCA6B + key).int()).unsqueeze(1)
    column_C = (torch.arange(columns.start, columns.stop, dtype=torch.int64, device=device) * 0x9E3779B1).int()
    bits_RC = _mix(row_R1 + column_C)
    # 24 bits fit a float32 exactly, so rounding cannot differ between devices.
    return bits_RC.bitwise_right_shift_(8).float().mul_(_STD * math.sqrt(3) / 2**23)


def _mix(x: Tensor) -> Tensor:
    """Mix 32 bits bijectively, in place. Source: "lowbias32" of Chris Wellons' hash-prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - _INT32), (16, 1)):
        # torch's right shift of signed integers is arithmetic; the mask makes it logical.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            x.mul_(factor)
    return x
