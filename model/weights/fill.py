"""From a checkpoint into memory: fills a rank's fused tensors, part by part."""

from collections.abc import Callable, Mapping

import torch

from tightwire.kernels.spec.packed import Matrix, PackedMatrix, empty_packed
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import Fused
from tightwire.model.weights.source import CheckpointReader


def empty_matrix(fused: Fused, formats: WeightFormats, dtype: torch.dtype, device: torch.device) -> Matrix:
    """Room for ``fused``, kept as ``formats`` says."""
    packed = formats.of(fused)
    if packed is None:
        return torch.empty(fused.shape, dtype=dtype, device=device)
    return empty_packed(fused.shape[0], fused.shape[1], packed, device)


def fill(
    reader: CheckpointReader,
    tensors: Mapping[str, Fused],
    into: Mapping[str, Matrix],
    moved: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read every field of ``tensors`` into its place; ``moved`` is told the bytes filled, after each part."""
    for field, fused in tensors.items():
        out, start = into[field], 0
        for name, rows in fused.parts:
            stop = start + len(rows)
            part = out.rows(start, stop) if isinstance(out, PackedMatrix) else out[start:stop]
            reader.read_into(part, name, rows=rows, columns=fused.columns)
            moved(part.nbytes)
            start = stop
