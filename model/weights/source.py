"""The seam between layers and where their tensors live: resident, streamed or partitioned."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tightwire.kernels.spec.packed import Matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One layer's tensors on this rank's device, already split; ``local_`` sizes come from ``model.layout``.

    The fused matrices hold this rank's rows in the order named, so one matrix product serves all of them. Which fields are
    there, and of which tensors they are made, ``fused`` says.
    """

    attention_norm: Tensor  # (D,)
    qkv: Matrix  # (local_H*E + 2*local_K*E, D): q rows, then k, then v
    qkv_bias: Tensor | None = None
    attention_out: Matrix  # (D, local_H*E)
    attention_out_bias: Tensor | None = None  # (D,); present on rank 0 only, so that the sum over ranks adds it once
    mlp_norm: Tensor  # (D,)
    gate_up: Matrix  # (2*local_F, D): gate rows, then up
    gate_up_bias: Tensor | None = None
    down: Matrix  # (D, local_F)
    down_bias: Tensor | None = None  # (D,); rank 0 only


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterWeights:
    """What stands before and after the layers."""

    embedding: Matrix  # (local_V, D)
    final_norm: Tensor  # (D,)
    head: Matrix  # (local_V, D); the embedding itself when tied

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> "OuterWeights":
        """By field, without a head where it is tied."""
        return cls(**{"head": tensors["embedding"], **tensors})


class WeightSource(Protocol):
    """Hands out weights, pass after pass over the layers in order.

    What ``layer(i)`` gives is valid until ``release(i)`` has been called as often; several passes at once may share a layer.
    """

    @property
    def outer(self) -> OuterWeights: ...

    @property
    def spans(self) -> Sequence[range]:
        """The layers in order, cut so that all of a span can be had at the same time."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """Waits until the layer is there.

        Raises:
            WeightsError: it does not come.
        """
        ...

    def release(self, index: int) -> None: ...

    def close(self) -> None:
        """End whatever brings layers. May be called twice."""
        ...


class CheckpointReader(Protocol):
    """Reads parts of named tensors of one checkpoint; names are Hugging Face's (``model.layers.0.mlp.up_proj.weight``).

    Only the asked rows and columns are read into memory, so a rank's peak stays near its share.
    """

    def names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str:
        """The type of its numbers as GGUF would call it, such as F32 or Q4_1; ``random`` for what is in no file."""
        ...

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        """Copy ``tensor[rows][:, columns]`` (or ``vector[rows]``) into ``out``, converting to its dtype.

        Into a packed matrix blocks of its own format are copied as they are, columns being whole groups; anything else is
        quantized.

        Raises:
            ModelError: numbers that cannot be quantized.
        """
        ...
