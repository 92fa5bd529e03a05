"""Low-rank adapters (LoRA): their matrices in numbered entries, the rows that use them, and the reference product.

An adapter adds ``(x A^T) B^T`` to the product of a matrix. Several matrices may be fused by rows (q, k, v); each is a part,
with its own A and its own columns of the output.

Source: LoRA, arXiv 2106.09685; several adapters in a batch: S-LoRA, arXiv 2311.03285.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

PANEL_OUTPUTS = 64  # the columns of B that lie together


@dataclass(eq=False, slots=True)
class AdapterSite:
    """The adapters' matrices for one fused matrix of every layer. Each entry has room for ``max_rank``.

    The matrices in an entry lie densely, layer after layer: A (parts x rank, D), part after part, and B transposed, (rank, O),
    which includes the adapter's scale. B lies in panels of 64 columns, so that the kernels read what an item needs in one piece.
    """

    num_inputs: int  # D
    part_stops: tuple[int, ...]  # where the columns of each part end; the last one is O
    num_layers: int
    a_NX: Tensor  # (N, layers x parts x max_rank x D)
    b_NX: Tensor  # (N, layers x max_rank x O)
    ranks_N: Tensor = field(init=False)  # int32 on the matrices' device; 0: the entry has no matrices here
    ranks: list[int] = field(init=False)  # the same on the host
    native: Any = None  # the C struct of these matrices, until they change

    def __post_init__(self) -> None:
        self.ranks = [0] * len(self.a_NX)
        self.ranks_N = torch.zeros(len(self.a_NX), dtype=torch.int32, device=self.a_NX.device)

    @classmethod
    def empty(
        cls, num_inputs: int, part_stops: tuple[int, ...], num_layers: int, *, room: tuple[int, int], like: Tensor
    ) -> Self:
        """Make entries without adapters: ``room`` is their number and ``max_rank``; dtype and device are those of ``like``."""
        num_entries, max_rank = room
        a_NX = like.new_empty(num_entries, num_layers * len(part_stops) * max_rank * num_inputs)
        b_NX = like.new_empty(num_entries, num_layers * max_rank * part_stops[-1])
        return cls(num_inputs, part_stops, num_layers, a_NX, b_NX)

    @property
    def num_parts(self) -> int:
        return len(self.part_stops)

    @property
    def parts(self) -> list[slice]:
        """The columns of each part."""
        return [slice(start, stop) for start, stop in pairwise((0, *self.part_stops))]

    def set_rank(self, entry: int, rank: int) -> None:
        """Declare the rank of the matrices that an entry holds, or is about to hold."""
        self.ranks[entry], self.native = rank, None
        self.ranks_N[entry] = rank

    def a(self, entry: int, layer: int) -> Tensor:
        """Return a view of A, (parts x rank, D)."""
        return self._of_layer(self.a_NX, entry, layer, self.num_parts * self.ranks[entry], self.num_inputs)

    def b(self, entry: int, layer: int) -> Tensor:
        """Return a copy of B, (rank, O)."""
        panels_PRO, last_RO = self._panels(entry, layer)
        return torch.cat((panels_PRO.transpose(0, 1).flatten(1), last_RO), dim=1)

    def set_b(self, entry: int, layer: int, b_RO: Tensor) -> None:
        """Store B, rounded to the dtype of the entries."""
        panels_PRO, last_RO = self._panels(entry, layer)
        full_RO, rest_RO = b_RO.split((b_RO.shape[1] - last_RO.shape[1], last_RO.shape[1]), dim=1)
        panels_PRO.copy_(full_RO.unflatten(1, (len(panels_PRO), PANEL_OUTPUTS)).transpose(0, 1))
        last_RO.copy_(rest_RO)

    def _panels(self, entry: int, layer: int) -> tuple[Tensor, Tensor]:
        """B as it lies: the full panels (P, rank, 64), and behind them the last one (rank, fewer or none)."""
        rank, num_outputs = self.ranks[entry], self.part_stops[-1]
        num_panels, rest = divmod(num_outputs, PANEL_OUTPUTS)
        stored_X = self._of_layer(self.b_NX, entry, layer, rank, num_outputs).view(-1)
        full_X, last_X = stored_X.split((rank * num_panels * PANEL_OUTPUTS, rank * rest))
        return full_X.view(num_panels, rank, PANEL_OUTPUTS), last_X.view(rank, rest)

    def _of_layer(self, all_NX: Tensor, entry: int, layer: int, num_rows: int, num_columns: int) -> Tensor:
        size = num_rows * num_columns
        return all_NX[entry, layer * size : (layer + 1) * size].view(num_rows, num_columns)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The entry of each row of a step."""

    entries_T: Tensor  # int32; -1: no adapter
    # int64 on the host: first row, number of rows and entry of rows that follow each other.
    runs_S3: Tensor | None = None

    @classmethod
    def of(cls, entries_T: Tensor) -> Self:
        """Find the runs of rows with the same entry, if the entries are on the host."""
        return cls(entries_T, None if entries_T.is_cuda else find_runs(entries_T))


def find_runs(entries_T: Tensor) -> Tensor:
    """Return (S, 3) int64: first row, number of rows and entry of each run of rows with the same adapter."""
    entries, lengths = torch.unique_consecutive(entries_T.cpu(), return_counts=True)
    runs_S3 = torch.stack((lengths.cumsum(0) - lengths, lengths, entries.long()), dim=1)
    return runs_S3[entries >= 0].contiguous()


def add_adapters_reference(out_TO: Tensor, x_TD: Tensor, site: AdapterSite, layer: int, rows: AdapterRows) -> None:
    """Add ``(x A^T) B^T`` of each row's adapter to ``out``, in float32, rounded once to the dtype of ``out``."""
    runs_S3 = find_runs(rows.entries_T) if rows.runs_S3 is None else rows.runs_S3
    for first, num_rows, entry in runs_S3.tolist():
        rank = site.ranks[entry]
        if not rank:
            continue
        own, b_RO = slice(first, first + num_rows), site.b(entry, layer).float()
        shrunk_TR = x_TD[own].float() @ site.a(entry, layer).float().t()
        for part, columns in enumerate(site.parts):
            added = shrunk_TR[:, part * rank : (part + 1) * rank] @ b_RO[:, columns]
            out_TO[own, columns] = (out_TO[own, columns].float() + added).to(out_TO.dtype)


def check_adapters(out: Tensor, x: Tensor, site: AdapterSite, layer: int, entries: Tensor) -> None:
    """Raise ValueError unless these are the arguments of ``add_adapters``. The entries themselves are not read."""
    if not 0 <= layer < site.num_layers:
        raise ValueError(f"adapters of layer {layer}; there are layers 0 to {site.num_layers - 1}")
    shapes = (len(entries), site.part_stops[-1]), (len(entries), site.num_inputs)
    if (out.shape, x.shape) != shapes or x.dtype != site.a_NX.dtype or out.dtype not in (x.dtype, torch.float32):
        needs = f"adapters need out {shapes[0]} and x {shapes[1]} in {site.a_NX.dtype}, out perhaps in torch.float32"
        raise ValueError(f"{needs}; got {tuple(out.shape)} {out.dtype} and {tuple(x.shape)} {x.dtype}")
    if not (out.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"adapters need contiguous out and x; got strides {out.stride()} and {x.stride()}")
