"""Weights that stay on the device: each rank's slices, read straight into the fused tensors the layers use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.model.config import LlamaConfig
from tightwire.model.layout import Shard, num_weights
from tightwire.model.weights.names import EMBEDDING, FINAL_NORM, HEAD
from tightwire.model.weights.source import CheckpointReader, LayerWeights, OuterWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentWeights:
    """``WeightSource`` that has everything in memory from the start; ``release`` keeps it there."""

    outer: OuterWeights
    layers: tuple[LayerWeights, ...]

    def layer(self, index: int) -> LayerWeights:
        return self.layers[index]

    def release(self, index: int) -> None:
        """Nothing to give back."""


def load_resident(
    reader: CheckpointReader,
    config: LlamaConfig,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda fraction: None,
) -> ResidentWeights:
    """Read this rank's part of the checkpoint.

    Host memory grows by the rank's share (on CPU: the tensors themselves) and a few MiB for the piece in hand.

    Args:
        progress: called with the share of the rank's bytes read so far, 0 to 1, after each tensor.
    Cost: ``num_weights(config, shard)`` numbers of ``dtype`` on the device.
    """
    filler = _Filler(reader, dtype, device, num_weights(config, shard) * dtype.itemsize, progress)
    rows = shard.vocab_rows
    embedding = filler.fill([(EMBEDDING, rows)])
    layers = tuple(_load_layer(filler, config, shard, index) for index in range(config.num_layers))
    final_norm = filler.fill([(FINAL_NORM, range(config.hidden_size))])
    head = embedding if config.tied_embeddings else filler.fill([(HEAD, rows)])
    return ResidentWeights(outer=OuterWeights(embedding=embedding, final_norm=final_norm, head=head), layers=layers)


class _Filler:
    """Allocates a tensor and fills it from parts of the checkpoint's; keeps count for the progress bar."""

    def __init__(
        self,
        reader: CheckpointReader,
        dtype: torch.dtype,
        device: torch.device,
        total_bytes: int,
        progress: Callable[[float], None],
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._device = device
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def fill(self, parts: Sequence[tuple[str, range]], columns: range | None = None) -> Tensor:
        """The named tensors' rows, one part below the other; of each row the given columns."""
        width = self._reader.shape(parts[0][0])[1:]
        if columns is not None:
            width = (len(columns),)
        num_rows = sum(len(rows) for _, rows in parts)
        out = torch.empty((num_rows, *width), dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in parts:
            self._reader.read_into(out[start : start + len(rows)], name, rows=rows, columns=columns)
            start += len(rows)
        self._done_bytes += out.nbytes
        self._progress(self._done_bytes / self._total_bytes)
        return out


def _load_layer(filler: _Filler, config: LlamaConfig, shard: Shard, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    every = range(config.hidden_size)
    query, kv = _head_rows(shard.query_heads, config.head_dim), _head_rows(shard.kv_heads, config.head_dim)
    qkv = [(attention + "q_proj.", query), (attention + "k_proj.", kv), (attention + "v_proj.", kv)]
    gate_up = [(mlp + "gate_proj.", shard.mlp_columns), (mlp + "up_proj.", shard.mlp_columns)]
    out, down = [(attention + "o_proj.", every)], [(mlp + "down_proj.", every)]

    def weight(parts: Sequence[tuple[str, range]], columns: range | None = None) -> Tensor:
        return filler.fill([(name + "weight", rows) for name, rows in parts], columns)

    def bias(parts: Sequence[tuple[str, range]], present: bool) -> Tensor | None:
        return filler.fill([(name + "bias", rows) for name, rows in parts]) if present else None

    first = shard.rank == 0
    return LayerWeights(
        attention_norm=weight([(prefix + "input_layernorm.", every)]),
        qkv=weight(qkv),
        qkv_bias=bias(qkv, config.attention_bias),
        attention_out=weight(out, query),
        attention_out_bias=bias(out, config.attention_bias and first),
        mlp_norm=weight([(prefix + "post_attention_layernorm.", every)]),
        gate_up=weight(gate_up),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=weight(down, shard.mlp_columns),
        down_bias=bias(down, config.mlp_bias and first),
    )


def _head_rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
