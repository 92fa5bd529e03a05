"""One layer's tensors, and the protocol of what provides them: resident, streamed or partitioned weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tightwire.kernels.spec.packed import Matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's tensors on this rank's device, already split; ``local_`` sizes come from ``model.layout``.

    The fused matrices hold this rank's rows in the order named, so one matrix product serves all of them. ``fused`` lists
    the fields and the checkpoint's tensors of each.
    """

    attention_norm: Tensor  # (D,)
    qkv: Matrix  # (local_H*E + 2*local_K*E, D): q rows, then k, then v
    qkv_bias: Tensor | None = None
    attention_out: Matrix  # (D, local_H*E)
    attention_out_bias: Tensor | None = None  # (D,); rank 0 only, so the sum over ranks adds it once
    mlp_norm: Tensor  # (D,)
    gate_up: Matrix  # (2*local_F, D): gate rows, then up
    gate_up_bias: Tensor | None = None
    down: Matrix  # (D, local_F)
    down_bias: Tensor | None = None  # (D,); rank 0 only


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterWeights:
    """The tensors before and after the layers."""

    embedding: Matrix  # (local_V, D)
    final_norm: Tensor  # (D,)
    head: Matrix  # (local_V, D); the embedding itself when tied

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "OuterWeights":
        """From tensors by field; a tied head is left out there."""
        return cls(**{"head": tensors["embedding"], **tensors})


class WeightSource(Protocol):
    """Provides weights, pass after pass over the layers in order.

    The result of ``layer(i)`` is valid until ``release(i)`` has been called as often; several passes may share a layer.
    """

    @property
    def outer(self) -> OuterWeights: ...

    @property
    def spans(self) -> Sequence[range]:
        """The layers in order, in spans whose layers can all be on the device at the same time."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Wait until the layer is on the device.

        Raises:
            WeightsError: it does not arrive.
        """
        ...

    def release(self, index: int) -> None: ...

    def close(self) -> None:
        """End the threads that fetch layers. May be called twice."""
        ...
