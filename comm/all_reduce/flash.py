"""Flash AllReduce: two-shot with both legs quantized. For large messages on slow links, at a loss of accuracy.

The owner of a slice decodes its own sum too, so that all ranks hold the same bits. Source: Flash Communication, arXiv
2412.04964; bit splitting for 5 and 6 bits after Flash Communication V2, 2508.03760.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.entry import Setting, Work, coded_elem_bytes, coding_effort
from tightwire.comm.all_reduce.names import NAMES, main_preset_names
from tightwire.comm.codec.codec import NONE, Carried, Codec, Feedback, prepare_codecs, slices_for
from tightwire.comm.codec.error_bounds import quantized_sum_bound, quantized_total_bound, rank_order_bound
from tightwire.comm.group.group import Group
from tightwire.comm.group.legs import sum_in_two_legs, two_leg_bytes


class FlashAllReduce(BaseAllReduce):
    """Encode slices, exchange, decode + sum + encode this rank's slice, gather, decode.

    Cost: two rounds; ``two_leg_bytes`` for slices of ceil(n / N) elements rounded up to whole groups, about 2 (N-1)/N *
    n * b/8 with b bits an element. Exactness: one quantization in each leg. An element's result depends only on the
    ranks' numbers in its own group, so rows of whole groups do not depend on other rows of the message.
    """

    def __init__(self, group: Group, reduce_codec: Codec, gather_codec: Codec, name: str) -> None:
        super().__init__(group)
        self.name = name
        self._codecs = reduce_codec, gather_codec
        self.lossless = reduce_codec.exact and gather_codec.exact
        prepare_codecs(group.device, reduce_codec, gather_codec)
        fused = group.transport.fused
        if fused is not None:
            self._fused = lambda x, carried: fused.flash(x, *self._codecs, carried)
            self._hides_coding = not (fused.tells_coding or self.lossless)

    def _carried(self, feedback: Feedback, phase: str, x: Tensor) -> Carried:
        reduce_codec, gather_codec = self._codecs
        return (
            feedback.carried(f"{phase} reduce", reduce_codec, x.numel(), x.device),
            feedback.carried(f"{phase} gather", gather_codec, x.numel(), x.device),
        )

    def slices(self, num_elems: int) -> list[int]:
        return slices_for(num_elems, self.world_size, *self._codecs)

    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        lengths = self.slices(x_N.numel())
        return sum_in_two_legs(self._group, x_N, lengths, self._codecs, x_N.dtype, carried)

    def _exact_bytes(self, x: Tensor) -> int | None:
        if self.lossless:
            return None
        return flash_bytes(self.rank, self.world_size, x.numel(), x.element_size(), NONE, NONE)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return two_leg_bytes(self.rank, self.slices(num_elems), self._codecs, elem_bytes)

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Bound: the ranks' reduce-leg bounds and the additions, then the gather leg's bound for the sum, then one rounding."""
        if self.lossless:
            return rank_order_bound(inputs)
        if self.world_size == 1:
            return torch.zeros(inputs[0].shape, dtype=torch.float64, device=inputs[0].device)
        flat = [x.reshape(-1) for x in inputs]
        sum_N, error_N = quantized_sum_bound(flat, self._codecs[0])
        return quantized_total_bound(flat, sum_N, error_N, self._codecs[1]).view(inputs[0].shape)


def flash_bytes(
    rank: int, world_size: int, num_elems: int, elem_bytes: int, reduce_codec: Codec, gather_codec: Codec
) -> int:
    """Bytes that ``rank`` sends: the others' slices, then the sum of its own slice to each of them."""
    lengths = slices_for(num_elems, world_size, reduce_codec, gather_codec)
    return two_leg_bytes(rank, lengths, (reduce_codec, gather_codec), elem_bytes)


def flash_work(setting: Setting, num_bytes: int, reduce_codec: Codec, gather_codec: Codec) -> Work:
    ranks, elems = setting.world_size, num_bytes / setting.elem_bytes
    elem_bytes = coded_elem_bytes(reduce_codec, setting) + coded_elem_bytes(gather_codec, setting)
    sent = (ranks - 1) / ranks * elems * elem_bytes
    # Encode all slices and decode one from each rank; then encode this rank's sum and decode all sums.
    reduced, gathered = elems * coding_effort(reduce_codec), elems * coding_effort(gather_codec)
    summed = elems if reduce_codec.exact else 0
    return Work(2, sent, summed, reduced + gathered / ranks, reduced + gathered)


def bytes_of_rank_0(setting: Setting, num_bytes: int, reduce_codec: Codec, gather_codec: Codec) -> int:
    num_elems = num_bytes // setting.elem_bytes
    return flash_bytes(0, setting.world_size, num_elems, setting.elem_bytes, reduce_codec, gather_codec)


def _lossy_names(suffix: str) -> list[str]:
    names = main_preset_names()
    if suffix != "-g32":
        return names
    presets = NAMES["flash"].presets
    return ["flash:" + ",".join(presets[name]).replace("-g64", suffix) for name in names]


ENTRY = replace(
    NAMES["flash"],
    make=FlashAllReduce,
    work=flash_work,
    wire_bytes=bytes_of_rank_0,
    lossy_names=_lossy_names,
    preference=5,
)
