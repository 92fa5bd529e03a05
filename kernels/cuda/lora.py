"""Low-rank adapters on a GPU, for rows of several adapters and of none in one launch of each of two kernels.

A program computes a tile of sixteen rows. It passes over the entries that occur in its rows, with the other rows as zeros. The
scheduler sorts a step's rows by adapter, so most tiles have one or two. Sizes do not depend on which entries are used, so that
the launches can be recorded in a graph.

Source: Punica's shrink and expand, arXiv 2310.18547.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, wait_for_last
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw, widened
from tightwire.kernels.spec.lora import PANEL_OUTPUTS, AdapterSite, check_adapters

_ROWS = tl.constexpr(16)  # rows of a tile: the minimum of matrix units
_RANKS = tl.constexpr(16)  # outputs of A in a tile, and the depth of one product with B
_DEPTH = tl.constexpr(64)
_OUTPUTS = tl.constexpr(PANEL_OUTPUTS)
_NO_ENTRY = tl.constexpr(1 << 30)


def add_adapters(out_TO: Tensor, x_TD: Tensor, site: AdapterSite, layer: int, entries_T: Tensor) -> None:
    """Compute ``add_adapters_reference`` but for the order of the float32 sums; ``entries_T`` is on the GPU."""
    check_adapters(out_TO, x_TD, site, layer, entries_T)
    num_rows, num_outputs = out_TO.shape
    max_rank = site.b_NX.shape[1] // (site.num_layers * num_outputs)
    width = site.num_parts * max_rank
    shrunk_TR = torch.empty(num_rows, width, dtype=torch.float32, device=x_TD.device)
    row_tiles = -(-num_rows // _ROWS.value)
    if not row_tiles:
        return
    sizes = num_rows, width, site.num_inputs, layer, site.a_NX.stride(0)
    given = entries_T, site.ranks_N, x_TD, site.a_NX, shrunk_TR
    launch(_shrink, row_tiles * -(-width // _RANKS.value), x_TD.device, *given, *sizes, site.num_parts)
    sizes = num_rows, width, num_outputs, site.part_stops, layer, site.b_NX.stride(0)
    given = entries_T, site.ranks_N, shrunk_TR, site.b_NX, out_TO
    launch(_expand, row_tiles * -(-num_outputs // _OUTPUTS.value), x_TD.device, *given, *sizes)


@triton.jit
def _shrink(entries, ranks, x, a, shrunk, num_rows, width, depth, layer, entry_stride, NUM_PARTS: tl.constexpr):
    """Compute one tile of shrunk (T, width) = x A^T; row by row, only the first parts x rank numbers are written."""
    wait_for_last()
    num_tiles = tl.cdiv(width, _RANKS)
    row_R = tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)
    place_J = tl.program_id(0) % num_tiles * _RANKS + tl.arange(0, _RANKS)
    entry_R = tl.load(entries + row_R, mask=row_R < num_rows, other=-1)
    total_RJ = tl.zeros((_ROWS, _RANKS), tl.float32)
    for entry in range(tl.min(tl.where(entry_R < 0, _NO_ENTRY, entry_R), 0), tl.max(entry_R, 0) + 1):
        mine_R1 = (entry_R == entry)[:, None]
        own_width = tl.load(ranks + entry) * NUM_PARTS
        kept_J1 = (place_J < own_width)[:, None]
        a_J1 = a + _wide(entry) * entry_stride + (_wide(layer) * own_width + place_J)[:, None] * depth
        for start in range(0, depth, _DEPTH):
            place_1D = (start + tl.arange(0, _DEPTH))[None, :]
            inside_1D = place_1D < depth
            x_RD = load_operand(x + row_R.to(tl.int64)[:, None] * depth, place_1D, mine_R1 & inside_1D)
            a_JD = load_operand(a_J1, place_1D, kept_J1 & inside_1D)
            total_RJ = tl.dot(x_RD, tl.trans(a_JD), total_RJ, input_precision="ieee")
    place_RJ = row_R.to(tl.int64)[:, None] * width + place_J[None, :]
    tl.store(shrunk + place_RJ, total_RJ, mask=(entry_R >= 0)[:, None] & (place_J < width)[None, :])


@triton.jit
def _expand(entries, ranks, shrunk, b, out, num_rows, width, num_outputs, part_stops, layer, entry_stride):
    """Add one tile of shrunk B to out (T, O). Rows without an adapter are not written."""
    wait_for_last()
    num_tiles = tl.cdiv(num_outputs, _OUTPUTS)
    row_R = tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)
    first = tl.program_id(0) % num_tiles * _OUTPUTS
    output_O = first + tl.arange(0, _OUTPUTS)
    panel_outputs = tl.minimum(_OUTPUTS, num_outputs - first)
    entry_R = tl.load(entries + row_R, mask=row_R < num_rows, other=-1)
    part_O = tl.zeros_like(output_O)
    for before in tl.static_range(len(part_stops) - 1):
        part_O += (output_O >= part_stops[before]).to(tl.int32)
    kept_O = output_O < num_outputs
    written_R = entry_R < -1  # none yet
    total_RO = tl.zeros((_ROWS, _OUTPUTS), tl.float32)
    for entry in range(tl.min(tl.where(entry_R < 0, _NO_ENTRY, entry_R), 0), tl.max(entry_R, 0) + 1):
        rank = tl.load(ranks + entry)
        mine_R = (entry_R == entry) & (rank > 0)
        written_R = written_R | mine_R
        panel = raw(b) + _wide(entry) * entry_stride + (_wide(layer) * num_outputs + first) * rank
        b_1O = panel + tl.arange(0, _OUTPUTS)[None, :]
        for part in tl.static_range(len(part_stops)):
            own_O = kept_O & (part_O == part)
            for start in range(0, rank, _RANKS):
                place_J = start + tl.arange(0, _RANKS)
                inside_J = place_J < rank
                u_RJ = shrunk + row_R.to(tl.int64)[:, None] * width + (part * rank + place_J)[None, :]
                shrunk_RJ = tl.load(u_RJ, mask=mine_R[:, None] & inside_J[None, :], other=0.0)
                stored_JO = tl.load(
                    b_1O + place_J[:, None] * panel_outputs, mask=inside_J[:, None] & own_O[None, :], other=0
                )
                total_RO = tl.dot(shrunk_RJ, widened(stored_JO), total_RO, input_precision="ieee")
    place_RO = raw(out) + row_R.to(tl.int64)[:, None] * num_outputs + output_O[None, :]
    kept_RO = written_R[:, None] & kept_O[None, :]
    total_RO += widened(tl.load(place_RO, mask=kept_RO, other=0))
    tl.store(place_RO, narrowed(total_RO, out.dtype.element_ty), mask=kept_RO)


@triton.jit
def _wide(number):
    """Return a number in 64 bits; in the interpreter it is one of Python."""
    return tl.zeros((), tl.int64) + number
