"""Low-rank adapters on CPU: checks and argument structs around ``native/lora.cpp``."""

from typing import Any

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import ffi, lib, struct
from tightwire.kernels.cpu.linear import useful_threads
from tightwire.kernels.cpu.run import NUMBER_KIND, addresses, run_on_items
from tightwire.kernels.spec.lora import AdapterRows, AdapterSite, check_adapters

_SHRINK_OUTPUTS = 16  # of an item of tw_adapter_shrink


def add_adapters_cpu(out_TO: Tensor, x_TD: Tensor, site: AdapterSite, layer: int, rows: AdapterRows) -> None:
    """``kernels.lora.add_adapters`` for CPU tensors. Cost: about 15 us of Python per call, then the kernels."""
    runs_S3 = rows.runs_S3
    if runs_S3 is None or not len(runs_S3):
        return
    check_adapters(out_TO, x_TD, site, layer, rows.entries_T)
    native = native_site(site)
    if not native.most_width:
        return
    num_rows, num_runs = len(x_TD), len(runs_S3)
    shrunk_TR = torch.empty(num_rows, native.most_width)
    given = native, ffi.cast("tw_adapter_run *", runs_S3.data_ptr()), num_runs, layer
    places = addresses(x_TD, shrunk_TR, out_TO)
    arguments = struct("tw_adapter_args", (*given, *places, NUMBER_KIND[out_TO.dtype]))
    num_items = num_runs * -(-native.most_width // _SHRINK_OUTPUTS)
    max_threads = min(num_items, useful_threads(num_rows, native.most_width * site.num_inputs))
    run_on_items("tw_adapter_shrink", arguments, num_items, 1, max_threads)
    num_outputs, panel = site.part_stops[-1], lib.tw_panel()
    max_threads = min(-(-num_outputs // panel), useful_threads(num_rows, max(site.ranks) * num_outputs))
    run_on_items("tw_adapter_expand", arguments, num_outputs, panel, max_threads)


def native_site(site: AdapterSite) -> Any:
    """Return the ``tw_adapter_site`` of these matrices, valid until a rank is set."""
    if site.native is None:
        entries = ffi.new(f"tw_adapter[{len(site.ranks)}]")
        for entry, rank in enumerate(site.ranks):
            entries[entry] = (site.a_NX[entry].data_ptr(), site.b_NX[entry].data_ptr(), rank)
        most_width = site.num_parts * max(site.ranks)
        sizes = site.num_inputs, site.num_parts, site.part_stops, NUMBER_KIND[site.a_NX.dtype], most_width
        site.native = struct("tw_adapter_site", (entries, *sizes)), entries  # both are kept alive
    return site.native[0]
