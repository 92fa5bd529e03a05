"""Two-shot AllReduce for large messages: Flash AllReduce without codecs, with a ring's bytes in two rounds."""

from dataclasses import replace
from functools import partial

from tightwire.comm.all_reduce.flash import FlashAllReduce, bytes_of_rank_0, flash_work
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.codec.codec import NONE
from tightwire.comm.group.group import Group


class TwoShotAllReduce(FlashAllReduce):
    """exchange(slices), sum this rank's slice in rank order, gather(sums).

    Cost: M - s to reduce and (N-1) * s to gather, with this rank's slice s of about M/N. Exactness: as one-shot.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group, NONE, NONE, "two-shot")


ENTRY = replace(
    NAMES["two-shot"],
    make=TwoShotAllReduce,
    work=partial(flash_work, reduce_codec=NONE, gather_codec=NONE),
    wire_bytes=partial(bytes_of_rank_0, reduce_codec=NONE, gather_codec=NONE),
    preference=2,
)
