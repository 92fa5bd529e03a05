"""The tensors of a layer, the protocol of resident, streamed and partitioned weights, and resident weights."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from tightwire.buffers import LayerSource
from tightwire.kernels.spec.packed import Matrix, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's tensors on this rank's device, already split.

    Fused matrices (``formats.Fused``) hold this rank's rows in the order named, so one matrix product serves all of them.
    """

    # Norms are (D,); None where the model has none. Those of updates apply to the sum of the result before, as it is
    # added to the residual: before attention to that of the previous layer's MLP.
    attention_update_norm: Tensor | None = None
    attention_norm: Tensor | None = None
    mlp_update_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    q_norm: Tensor | None = None  # (E,), or this rank's rows of the projection
    k_norm: Tensor | None = None
    qkv: Weight  # (local_H*E + 2*local_K*E, D): q rows, then k, then v
    qkv_bias: Tensor | None = None
    attention_out: Matrix  # (D, local_H*E)
    attention_out_bias: Tensor | None = None  # (D,); only on rank 0, so the sum over the ranks adds it once
    gate_up: Weight  # (2*local_F, D): gate rows, then up
    gate_up_bias: Tensor | None = None
    down: Matrix  # (D, local_F)
    down_bias: Tensor | None = None  # (D,); only on rank 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterWeights:
    """The tensors before and after the layers. In a pipeline each stage reads those that it has; the others are None."""

    embedding: Matrix  # (local_V, D)
    final_norm: Tensor  # (D,)
    last_update_norm: Tensor | None = None  # (D,), of the last MLP's sum
    head: Matrix  # (local_V, D); the embedding itself when tied

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Self:
        """Make it from tensors by field; without a ``head`` the head is tied to the embedding."""
        absent: dict[str, Any] = {"embedding": None, "final_norm": None, "head": tensors.get("embedding")}
        return cls(**(absent | dict(tensors)))


class WeightSource(LayerSource):
    """Provides weights to repeated passes over the layers in order."""

    outer: OuterWeights
    spans: Sequence[range]  # the layers in order, in spans that can be on the device at the same time

    @abstractmethod
    def layer(self, index: int) -> LayerWeights:
        """Wait until the layer is on the device; raises WeightsError if it does not arrive in time."""


class ResidentWeights(WeightSource):
    """``WeightSource`` with all layers on the device."""

    def __init__(self, outer: OuterWeights, layers: tuple[LayerWeights, ...]) -> None:
        self.outer, self.layers, self.spans = outer, layers, (range(len(layers)),)

    def layer(self, index: int) -> LayerWeights:
        return self.layers[index]
