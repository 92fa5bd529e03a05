"""The weights of an engine that answers inside a trainer: what the trainer has in memory as kernels read it is not held twice.

That are the frozen matrices of flat parameters that one rank has whole: packed blocks, or numbers in the computing dtype. The rest,
norms and biases too, is read from the checkpoint.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.checkpoint.tensors import StackedParts
from tightwire.model.layout import Shard
from tightwire.model.weights.formats import Fused, WeightFormats, layer_tensors, outer_tensors
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel, pack_tensors
from tightwire.training.engine.shards import FrozenShard


def whole_matrices(frozen: Collection[FrozenShard]) -> dict[str, Matrix]:
    """The trainer's matrices that this rank has whole and as kernels read them, by their names in the model: views."""
    found: dict[str, Matrix] = {}
    for shard in frozen:
        own, numbers_N = shard.flat_param, shard.computable()
        if shard.form.ranks.world_size > 1:
            continue
        if own.blocks is not None:
            places = zip(own.blocks.params, own.formats, strict=True)
            found |= {place.name: PackedMatrix(place.of(shard.wire()), packed) for place, packed in places}
        elif numbers_N is not None:
            found |= {param.name: param.of(numbers_N) for param in own.params if len(param.shape) == 2}
    return found


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """An engine's weights in ``formats``, plain ones in ``dtype``; ``whole`` has matrices in memory, by their names in the model."""

    config: LlamaConfig
    formats: WeightFormats
    dtype: torch.dtype
    whole: Mapping[str, Matrix]

    def files(self, reader: CheckpointReader, shard: Shard) -> CheckpointStore:
        """What reads the others. ``shard``: this rank's."""
        layers = [layer_tensors(self.config, shard, layer) for layer in range(self.config.num_layers)]
        outer, *plain = map(self._layer, [outer_tensors(self.config, shard), *layers])
        return CheckpointStore(reader, self.config, shard, PackedModel(outer, tuple(plain), tuple(plain)))

    def _layer(self, tensors: Mapping[str, Fused]) -> PackedLayer:
        held = {name: own for name, fused in tensors.items() if (own := self.find(fused)) is not None}
        read = {name: fused for name, fused in tensors.items() if name not in held}
        return replace(pack_tensors(read, self.formats, self.dtype), held=held)

    def find(self, fused: Fused) -> Weight | None:
        """The matrix in memory, if it is there as the engine would read it; parts of one format follow each other."""
        runs, stacked = list[Matrix](), StackedParts(self.config)
        for name, rows in fused.parts:
            stored, place = stacked.find(name)
            if (matrix := self.whole.get(stored)) is None or fused.columns != range(matrix.shape[1]):
                return None
            first = rows.start + (place.start if place else 0)
            last = first + len(rows)
            part = matrix[first:last] if isinstance(matrix, Tensor) else matrix.rows(first, last)
            joined = _joined(runs[-1], part) if runs else None
            runs = [*runs, part] if joined is None else [*runs[:-1], joined]
        packed = tuple(run for run in runs if isinstance(run, PackedMatrix))
        if self.formats.of(fused) != tuple((run.shape[0], run.format) for run in packed):
            return None
        if packed:
            return packed[0] if len(packed) == 1 else StackedMatrix(packed)
        return runs[0] if len(runs) == 1 and isinstance(runs[0], Tensor) and runs[0].dtype == self.dtype else None


def _joined(first: Matrix, second: Matrix) -> Matrix | None:
    """Both as one matrix, if the second's rows follow the first's in memory."""
    if isinstance(first, PackedMatrix) and isinstance(second, PackedMatrix):
        blocks_OB = _joined(first.blocks_OB, second.blocks_OB) if first.format == second.format else None
        return PackedMatrix(blocks_OB, first.format) if isinstance(blocks_OB, Tensor) else None
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape[1] != second.shape[1]:
        return None
    of_one_memory = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not of_one_memory or second.data_ptr() != first.data_ptr() + first.nbytes:
        return None
    return first.as_strided((len(first) + len(second), first.shape[1]), first.stride())
