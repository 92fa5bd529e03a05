"""The seam between layers and where their tensors live: resident, streamed or partitioned."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's tensors on this rank's device, already split; ``local_`` sizes come from ``model.layout``.

    The fused matrices hold this rank's rows in the order named, so one matrix product serves all of them.
    """

    attention_norm: Tensor  # (D,)
    qkv: Tensor  # (local_H*E + 2*local_K*E, D): q rows, then k, then v
    qkv_bias: Tensor | None
    attention_out: Tensor  # (D, local_H*E)
    attention_out_bias: Tensor | None  # (D,); present on rank 0 only, so that the sum over ranks adds it once
    mlp_norm: Tensor  # (D,)
    gate_up: Tensor  # (2*local_F, D): gate rows, then up
    gate_up_bias: Tensor | None
    down: Tensor  # (D, local_F)
    down_bias: Tensor | None  # (D,); rank 0 only


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterWeights:
    """What stands before and after the layers."""

    embedding: Tensor  # (local_V, D)
    final_norm: Tensor  # (D,)
    head: Tensor  # (local_V, D); the embedding itself when tied


class WeightSource(Protocol):
    """Hands out weights; ``layer(i)`` is valid until ``release(i)``."""

    @property
    def outer(self) -> OuterWeights: ...

    def layer(self, index: int) -> LayerWeights: ...

    def release(self, index: int) -> None: ...


class CheckpointReader(Protocol):
    """Reads parts of named tensors of one checkpoint; names are Hugging Face's (``model.layers.0.mlp.up_proj.weight``).

    Only the asked rows and columns are read into memory, so a rank's peak stays near its share.
    """

    def names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_into(self, out: Tensor, name: str, *, rows: range, columns: range | None = None) -> None:
        """Copy ``tensor[rows][:, columns]`` (or ``vector[rows]``) into ``out``, converting to ``out.dtype``."""
        ...
