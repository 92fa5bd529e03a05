"""Adds the products of LoRA adapters to those of the base model's matrices, and holds several adapters on one rank.

Each adapter is in a numbered entry of fixed size, split as the base model is.

A split adds no bytes to the sums. For q, k, v, gate and up, each rank has the whole A and its rows of B. For o and down, each
rank has its columns of A and the whole B, so its product is a part of the sum that the ranks make anyway.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.kernels.lora import add_adapters
from tightwire.kernels.spec.lora import AdapterRows, AdapterSite
from tightwire.model.adapters.peft import AdapterFile
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import Fused, layer_tensors

SITES = ("qkv", "attention_out", "gate_up", "down")  # fields of ``LayerWeights``; the order of ``tw_layer_program``


class AdapterRoom(NamedTuple):
    """The room for adapters on a rank."""

    num_entries: int
    max_rank: int


def adapter_bytes(config: LlamaConfig, shard: Shard, room: AdapterRoom, elem_bytes: int) -> int:
    """Return the bytes of all entries on the rank with ``shard``."""
    per_layer = sum(len(fused.parts) * width + fused.num_rows for fused, width in _sites(config, shard).values())
    return room.num_entries * room.max_rank * config.num_layers * per_layer * elem_bytes


class AdapterProducts:
    """The adapters' matrices on one rank's device."""

    def __init__(
        self, config: LlamaConfig, shard: Shard, room: AdapterRoom, *, dtype: torch.dtype, device: torch.device
    ):
        """Memory on a CPU is used only once an adapter is loaded into it."""
        self._config, self._shard, self.room = config, shard, room
        self.beside: AdapterProducts | None = None  # the same adapters in the layers of a stage (``--layout hybrid``)
        like = torch.empty(0, dtype=dtype, device=device)
        self.sites: dict[str, AdapterSite] = {}
        for name, (fused, num_inputs) in _sites(config, shard).items():
            stops = torch.tensor([len(rows) for _, rows in fused.parts]).cumsum(0).tolist()
            self.sites[name] = AdapterSite.empty(num_inputs, tuple(stops), config.num_layers, room=room, like=like)

    def load(self, entry: int, adapter: AdapterFile) -> None:
        """Read this rank's part of an adapter into an entry that no running step uses. ModelError: it cannot be read."""
        self.clear(entry)
        if self.beside is not None:
            self.beside.load(entry, adapter)
        for name, site in self.sites.items():
            fused = [layer_tensors(self._config, self._shard, layer)[name] for layer in range(site.num_layers)]
            if not any(adapter.has(tensor.removesuffix(".weight")) for each in fused for tensor in each.names):
                continue
            site.set_rank(entry, adapter.rank)
            for layer, each in enumerate(fused):
                b_RO = self._read(site.a(entry, layer), adapter, each, site.parts)
                site.set_b(entry, layer, b_RO)

    def clear(self, entry: int) -> None:
        """Empty an entry: rows that use it get no adapter."""
        for site in (*self.sites.values(), *(self.beside.sites.values() if self.beside else ())):
            site.set_rank(entry, 0)

    def add(self, name: str, layer: int, x_TD: Tensor, out_TO: Tensor, rows: AdapterRows) -> None:
        """Add to ``out`` the adapters' products at the site ``name`` of a layer; see ``kernels.lora``."""
        add_adapters(out_TO, x_TD, self.sites[name], layer, rows)

    def _read(self, a_PD: Tensor, adapter: AdapterFile, fused: Fused, parts: list[slice]) -> Tensor:
        """Fill A of one layer and return B. Modules without an adapter, and ranks below the adapter's largest, get zeros."""
        assert fused.columns is not None
        rank = len(a_PD) // len(parts)
        b_RO = torch.zeros(rank, parts[-1].stop)
        for part, ((tensor, rows), columns) in enumerate(zip(fused.parts, parts, strict=True)):
            module, own = tensor.removesuffix(".weight"), slice(part * rank, (part + 1) * rank)
            a_PD[own].zero_()
            if adapter.has(module):
                a_RD, b_OR = adapter.read(module, rows, fused.columns)
                a_PD[own][: len(a_RD)] = a_RD.to(a_PD.dtype)
                b_RO[: b_OR.shape[1], columns] = b_OR.t()
        return b_RO


def _sites(config: LlamaConfig, shard: Shard) -> Mapping[str, tuple[Fused, int]]:
    """The fused matrices that adapters may change, each with its number of inputs on this rank."""
    tensors = layer_tensors(config, shard, 0)
    return {name: (tensors[name], tensors[name].shape[1]) for name in SITES}
