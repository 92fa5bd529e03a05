"""One rank's shard of a flat: the float32 values that the optimizer updates, and their encoded bytes."""

import torch
from torch import Tensor, nn

from tightwire.comm.codec.codec import Codec
from tightwire.training.engine.units import Flat


class MainShard:
    """``main`` is float32, (N / ranks,). ``version`` increases when it changes; copies of an older version are invalid.

    Cost: 4 bytes an element, plus the encoded bytes unless those are ``main`` itself (float32, exact codec).
    """

    def __init__(self, flat: Flat, num_ranks: int, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: of the computing weights, and of the wire if the codec is exact."""
        self.flat = flat
        self.codec = codec
        self.version = 0
        num_elems = flat.num_elems // num_ranks
        self.main = nn.Parameter(torch.zeros(num_elems, device=device), requires_grad=flat.trainable)
        self._dtype = dtype
        self._wire: Tensor | None = None
        if not (codec.exact and dtype == torch.float32):
            self._wire = torch.empty(shard_wire_bytes(flat, num_ranks, codec, dtype), dtype=torch.uint8, device=device)
        self._wire_version = -1

    def wire(self) -> Tensor:
        """The encoded shard, encoded once per version."""
        numbers_S = self.main.data
        if self._wire is None:
            return numbers_S.view(torch.uint8)
        if self._wire_version != self.version:
            if self.codec.exact:
                self._wire.view(self._dtype).copy_(numbers_S)
            else:
                self.codec.encode(numbers_S, self._wire)
            self._wire_version = self.version
        return self._wire


def shard_wire_bytes(flat: Flat, num_ranks: int, codec: Codec, dtype: torch.dtype) -> int:
    """Bytes of one rank's encoded shard."""
    return codec.wire_bytes(flat.num_elems // num_ranks, dtype.itemsize)
