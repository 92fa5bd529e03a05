"""A rank's part of its stage's layers, beside its shard of all layers (``--layout hybrid``): whole layers if it is alone there.

Rows of q, k, v, gate and up that the shard has are not held twice if all are in the part: the product with the part's matrix is
the shard's and that with the other rows, put in order. The output and down projections, whose columns are split, are
held besides. So a prompt's row has the bits of as many ranks as a stage has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.buffers import page_aligned
from tightwire.kernels.linear import linear
from tightwire.kernels.packed import arrange, embedding
from tightwire.kernels.spec.packed import Matrix, Weight
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.checkpoint.tensors import EMBEDDING
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import Fused, WeightFormats, layer_tensors, read_tensors
from tightwire.model.weights.packed_layer import pack_tensors
from tightwire.model.weights.source import LayerWeights, OuterWeights, ResidentWeights

_JOINED = ("qkv", "gate_up")  # matrices whose rows are split


class _Run(NamedTuple):
    """Consecutive rows of the part's matrix, and where they are: in the shard's matrix or in that of the other rows."""

    in_rest: bool
    rows: slice  # of that matrix
    whole: slice


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """A matrix of the part as two: the shard's rows, and the other rows."""

    shard: Weight
    rest: Weight
    runs: Sequence[_Run]  # in the order of the whole matrix's rows

    def multiply(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return ``linear`` with the whole matrix. ``bias``: of the whole matrix."""
        products = list[Tensor]()
        for weight, in_rest in ((self.shard, False), (self.rest, True)):
            bias = None if bias_O is None else [bias_O[run.whole] for run in self.runs if run.in_rest == in_rest]
            products.append(linear(x_TD, weight, None if bias is None else torch.cat(bias)))
        return torch.cat([products[run.in_rest][:, run.rows] for run in self.runs], dim=1)


def embed_whole(token_ids_T: Tensor, first: Matrix, others: Matrix) -> Tensor:
    """Return (T, D) float32, unscaled embeddings, from the table's first rows and the others."""
    first_T = token_ids_T < first.shape[0]
    first_TD = embedding(torch.where(first_T, token_ids_T, 0), first, torch.float32)
    other_TD = embedding(torch.where(first_T, 0, token_ids_T - first.shape[0]), others, torch.float32)
    return torch.where(first_T.unsqueeze(1), first_TD, other_TD)


def stage_bytes(
    config: LlamaConfig, shard: Shard, part: Shard, layers: range, formats: WeightFormats, elem_bytes: int
) -> int:
    """Return the bytes of a stage's weights in addition to the shard's; plain numbers take ``elem_bytes`` each."""
    tensors = [fused for layer in layers for fused in _lacking(config, shard, part, layer)[0].values()]
    tensors += _other_rows(config, shard).values()
    return sum(formats.num_bytes(fused, elem_bytes) for fused in tensors)


def load_stage(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    part: Shard,
    layers: range,
    formats: WeightFormats,
    dtype: torch.dtype,
    own: Sequence[LayerWeights],
    outer: OuterWeights,
) -> tuple[ResidentWeights, Matrix | None]:
    """Load what a stage needs beside the rank's own layers: its ``part`` of ``layers``, and on rank 0 the embedding's other rows.

    Raises ModelError. Cost: ``stage_bytes``.
    """

    def load(tensors: dict[str, Fused]) -> dict[str, Weight]:
        packed = pack_tensors(tensors, formats, dtype)
        loaded = packed.tensors(page_aligned(packed.num_bytes, torch.device("cpu")))
        read_tensors(reader, tensors, loaded)
        return {name: arrange(tensor) for name, tensor in loaded.items()}

    whole: list[LayerWeights] = []
    for layer in layers:
        tensors, runs = _lacking(config, shard, part, layer)
        changed: dict = load(tensors)
        changed |= {name: JoinedRows(getattr(own[layer], name), changed[name], runs[name]) for name in runs}
        whole.append(replace(own[layer], **changed))
    rows = load(_other_rows(config, shard)).get("embedding")
    assert rows is None or isinstance(rows, Matrix)
    if layers.stop < config.num_layers:  # the norm of the stage's last update is in the layer after it
        outer = replace(outer, last_update_norm=own[layers.stop].attention_update_norm)
    return ResidentWeights(outer, tuple(whole)), rows


def _lacking(
    config: LlamaConfig, shard: Shard, part: Shard, layer: int
) -> tuple[dict[str, Fused], dict[str, list[_Run]]]:
    """Return the tensors of the part of a layer that the shard lacks, and for matrices that are held as two where all rows are.

    Of these only the other rows are lacking.
    """
    whole, own = (layer_tensors(config, each, layer) for each in (part, shard))
    lacking = {name: fused for name, fused in whole.items() if fused != own.get(name)}
    joined: dict[str, list[_Run]] = {}
    for name in _JOINED:
        pairs = [(*of, mine) for of, (_, mine) in zip(whole[name].parts, own[name].parts, strict=True)]
        if name not in lacking or any(mine.start < rows.start or mine.stop > rows.stop for _, rows, mine in pairs):
            continue
        joined[name] = runs = list[_Run]()
        others, end = list[tuple[str, range]](), 0
        ends = [0, 0]  # of the rows used so far, in the shard's matrix and in the other
        for tensor, every, mine in pairs:
            before, behind = range(every.start, mine.start), range(mine.stop, every.stop)
            others += [(tensor, rows) for rows in (before, behind) if rows]
            for in_rest, rows in ((True, before), (False, mine), (True, behind)):
                start, num = ends[in_rest], len(rows)
                if num:
                    runs.append(_Run(in_rest, slice(start, start + num), slice(end, end + num)))
                ends[in_rest], end = start + num, end + num
        lacking[name] = Fused(tuple(others), whole[name].columns)
    return lacking, joined


def _other_rows(config: LlamaConfig, shard: Shard) -> dict[str, Fused]:
    """Return the rows of the embedding that rank 0's shard lacks; no other rank embeds prompts."""
    if shard.rank:
        return {}
    rows = range(shard.vocab_rows.stop, config.vocab_size)
    return {"embedding": Fused(((EMBEDDING, rows),), range(config.hidden_size))}
