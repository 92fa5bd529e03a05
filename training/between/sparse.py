"""Base of the sparse slots ``dgc`` and ``top_k``: sends the largest accumulated elements and keeps the rest.

The largest elements are selected per parameter, so parameters of a small scale are sent too. Values are mean gradients
of a node (the sum over its ranks divided by their number), so the kept state stays valid on another number of ranks,
and weight decay needs no rescaling (see ``dgc``). The rounding error of sent values is kept too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tightwire.comm.collectives.collectives import sparse_all_gather, sparse_all_gather_bytes
from tightwire.training.between.dense import dense_bytes, exact_all_reduce
from tightwire.training.between.local_clip import clip_pieces, local_norm
from tightwire.training.between.replicas import Replicas
from tightwire.training.between.top_elements import num_sent, top_elements
from tightwire.training.config.between import SparseOptions
from tightwire.training.engine.units import Piece, UnitShard

_INDEX_BYTES = 4
_VALUE_TYPES = {"float32": torch.float32, "float16": torch.float16}
_MOST_ELEMS = torch.iinfo(torch.int32).max
_STEP = "step"


def split_pieces(shard: UnitShard, options: SparseOptions, sparsity: float | None) -> tuple[list[Piece], list[Piece]]:
    """The pieces sent whole, and the pieces of which the largest elements are sent. ``sparsity`` None: all whole."""
    limit = math.inf if sparsity is None else options.dense_below
    whole = [piece for piece in shard.pieces if piece.parameter_elems < limit]
    return whole, [piece for piece in shard.pieces if piece.parameter_elems >= limit]


def sparse_bytes(rank: int, world_size: int, shard: UnitShard, options: SparseOptions, step: int) -> int:
    """Bytes sent at ``step``: (n-1) (8 + K (4 + value)) for K elements, plus ``dense_bytes`` of whole pieces."""
    sparsity = options.sparsity_at(step)
    whole, largest = split_pieces(shard, options, sparsity)
    num_bytes = dense_bytes(rank, world_size, sum(piece.num_elems for piece in whole))
    counts = [num_sent(piece.num_elems, sparsity or 0.0) for piece in largest if piece.num_elems]
    if counts:
        value_bytes = _VALUE_TYPES[options.value_type].itemsize
        num_bytes += sparse_all_gather_bytes(world_size, sum(counts), _INDEX_BYTES, value_bytes)
    return num_bytes


class SparseBetween(ABC):
    """A slot that keeps what it does not send; a subclass defines what is added to it.

    State: ``residual/UNIT``, (N,) float32, and the step number; all allocated at construction. Cost: ``sparse_bytes``,
    two rounds, ``top_elements`` of each piece, and temporary memory for one piece.
    """

    name: str

    def __init__(self, replicas: Replicas, options: SparseOptions) -> None:
        for unit, shard in replicas.units.items():
            if shard.num_elems > _MOST_ELEMS:
                raise ValueError(
                    f"{unit} has {shard.num_elems} elements on this rank, and indices of 32 bits reach {_MOST_ELEMS}; "
                    "cut it over more ranks, or take the slot dense or quantized"
                )
        self._replicas, self._options = replicas, options
        self._all_reduce = exact_all_reduce(replicas.group)
        self._residuals = self._zeros()
        self._step = 0
        self._summed: set[str] = set()

    def __call__(self, unit: str, sum_N: Tensor) -> Tensor:
        shard = self._replicas.shard(unit)
        if sum_N.shape != (shard.num_elems,) or sum_N.dtype != torch.float32:
            raise ValueError(
                f"{unit} is a float32 shard of {shard.num_elems} elements, got {sum_N.dtype} {tuple(sum_N.shape)}"
            )
        if unit in self._summed:
            raise RuntimeError(
                f"{self.name} was given {unit} twice in step {self._step}: it adds up over steps, so micro-batches are to "
                "be added up before it, and step_done called after each step"
            )
        self._summed.add(unit)
        sparsity = self._options.sparsity_at(self._step)
        whole, largest = split_pieces(shard, self._options, sparsity)
        if whole:
            self._sum_whole(unit, whole, sum_N)
        if largest and sparsity is not None:
            self._sum_largest(unit, largest, sparsity, sum_N)
        return sum_N

    def step_done(self) -> None:
        self._step += 1
        self._summed.clear()

    def wire_bytes(self, unit: str) -> int:
        group = self._replicas.group
        return sparse_bytes(group.rank, group.world_size, self._replicas.shard(unit), self._options, self._step)

    def state_dict(self) -> dict[str, Tensor]:
        return {_STEP: torch.tensor(self._step), **self._kept()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self._kept()
        if {_STEP, *own} != set(state):
            unlike = sorted({_STEP, *own} ^ set(state))
            raise ValueError(
                f"the checkpoint is of another slot than {self.name}, or of other units: {', '.join(unlike)}"
            )
        for key, tensor in own.items():
            if state[key].shape != tensor.shape:
                raise ValueError(
                    f"{key} has {tensor.numel()} elements on this rank and {state[key].numel()} in the checkpoint; "
                    "a checkpoint is cut anew when a run resumes"
                )
        for key, tensor in own.items():
            tensor.copy_(state[key])
        self._step = int(state[_STEP])
        self._summed.clear()

    def _sum_whole(self, unit: str, pieces: Sequence[Piece], sum_N: Tensor) -> None:
        """Overwrite ``pieces`` of ``sum_N`` with ``_direction`` of the mean over nodes, times ``num_gradients``."""
        divisor = self._replicas.num_gradients
        mean_N = self._all_reduce(torch.cat([sum_N[piece.place] for piece in pieces])).div_(divisor)
        means = mean_N.split([piece.num_elems for piece in pieces])
        if self._options.clip_norm is not None:
            clip_pieces(means, self._options.clip_norm, self._replicas.inside)
        for piece, mean in zip(pieces, means, strict=True):
            torch.mul(self._direction(unit, piece, mean), divisor, out=sum_N[piece.place])

    def _sum_largest(self, unit: str, pieces: Sequence[Piece], sparsity: float, sum_N: Tensor) -> None:
        """Add ``pieces`` of ``sum_N`` to the residual, send the largest elements, write their sum over nodes back."""
        group, per_node = self._replicas.group, self._replicas.gradients_per_node
        means = [sum_N[piece.place].div_(per_node) for piece in pieces]
        if self._options.clip_norm is not None:
            clip_pieces(means, local_norm(self._options.clip_norm, group.world_size), self._replicas.inside)
        residual_N = self._residuals[unit]
        chosen = []
        for piece, mean in zip(pieces, means, strict=True):
            kept = residual_N[piece.place]
            kept.add_(self._direction(unit, piece, mean))
            mean.zero_()
            if piece.num_elems:
                chosen.append(top_elements(kept, num_sent(piece.num_elems, sparsity)) + piece.start)
        if not chosen:
            return  # the same shard of the other nodes has no elements here either
        indices_K = torch.cat(chosen)
        values_K = _on_wire(residual_N[indices_K], _VALUE_TYPES[self._options.value_type])
        residual_N[indices_K] -= values_K.float()
        self._sent(unit, indices_K)
        for indices, values in sparse_all_gather(group, indices_K.int(), values_K):
            sum_N.index_add_(0, indices, values.float(), alpha=per_node)

    @abstractmethod
    def _direction(self, unit: str, piece: Piece, mean: Tensor) -> Tensor:
        """The values to accumulate for a piece, given its mean gradient, which may be overwritten."""

    @abstractmethod
    def _sent(self, unit: str, indices_K: Tensor) -> None:
        """Called when these elements of the unit's shard are about to be sent."""

    def _kept(self) -> dict[str, Tensor]:
        """The tensors kept from step to step, by their names in ``state_dict``."""
        return {f"residual/{unit}": residual_N for unit, residual_N in self._residuals.items()}

    def _zeros(self) -> dict[str, Tensor]:
        device = self._replicas.group.device
        return {unit: torch.zeros(shard.num_elems, device=device) for unit, shard in self._replicas.units.items()}


def _on_wire(values_K: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``. Finite values are clamped and stay finite; the residual keeps the difference."""
    largest = torch.finfo(dtype).max
    return torch.where(values_K.isfinite(), values_K.clamp(-largest, largest), values_K).to(dtype)
