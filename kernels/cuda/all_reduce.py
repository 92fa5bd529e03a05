"""AllReduces as one kernel per process, over memory that all processes map.

Every process owns a *peer buffer*: the header of ``barrier``, two send buffers, and one buffer for its sums. Kernels:

    one-shot    copies its numbers to its send buffer | waits | adds all processes' numbers
    two-shot    copies them, one entry per process    | waits | adds its own entries and publishes the sums | waits |
                collects all sums. With formats (flash), entries and sums on the wire are ``block_quant``'s bytes

Sums are float32 in the order of the processes, rounded once; an owner also decodes its own quantized sums. So all
processes get the same bits, equal to those of the generic algorithms (comm/all_reduce).

There is no wait at the end, because call n sends from buffer n % 2. Before kernel n + 2 writes that buffer again, kernel n + 1 has
passed a barrier with the peers' kernels n + 1, which do nothing before their kernels n end. Likewise sums are written after the
first barrier of a call, when the peers have finished the previous call. Therefore every block takes part in every call, even with
nothing to do, and one stream runs all calls of a process. The device counts calls, so graphs can be replayed between other calls.

A block reads only what blocks with the same number wrote, in any process, and waits only for those. The buffers limit a
launch's message; ``comm.transport.peer_memory`` cuts longer ones.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from tightwire.kernels.cuda.all_reduce_kernels import one_shot_kernel, two_shot_kernel
from tightwire.kernels.cuda.barrier import header_bytes
from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import ANY, ROWS, Tiling, make_tiling
from tightwire.kernels.spec.block_format import BlockFormat
from tightwire.kernels.spec.block_quant import check_carried

_ALIGNMENT = 128  # alignment of entries, in bytes
# Numbers per block and iteration: few for short messages, which would not occupy all blocks otherwise.
_SHORT_ELEMS, _LONG_ELEMS = 1024, 4096


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """A process's view of all processes' peer buffers.

    ``failure`` is one int32 in pinned memory that kernels write and the host reads without synchronizing: 0, or a bit for
    each process that was late.
    """

    addresses: Tensor  # (W,) int64 on the kernels' device: where this process maps each process's buffer
    rank: int
    send_bytes: int  # size of a send buffer; the buffer for the sums holds a W-th of it
    num_blocks: int  # blocks of every launch; at most as many as the device runs at once
    failure: Tensor
    memory: object  # keeps the addresses valid

    @property
    def world_size(self) -> int:
        return self.addresses.numel()


def buffer_bytes(send_bytes: int, num_blocks: int, world_size: int) -> int:
    """Return the size of one process's peer buffer, which must be zeroed before the first call of any process."""
    return header_bytes(num_blocks, world_size) + 2 * send_bytes + send_bytes // world_size


def one_shot(x_N: Tensor, out_N: Tensor, peers: PeerBuffers, max_polls: int) -> None:
    """Sum all processes' contiguous ``x_N`` of up to ``peers.send_bytes`` to ``out_N``; all must make the same call."""
    assert 0 < x_N.nbytes <= peers.send_bytes, f"{x_N.nbytes} B in a buffer of {peers.send_bytes}"
    tiling = _tiling((x_N.numel(),), x_N.numel(), peers.num_blocks)
    sizes = header_bytes(peers.num_blocks, peers.world_size), peers.send_bytes
    given = x_N, out_N, peers.addresses, peers.failure, x_N.numel(), peers.rank, *sizes, max_polls
    launch(one_shot_kernel, peers.num_blocks, x_N.device, *given, peers.world_size, tiling)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of every process's slice that one launch handles: numbers ``start`` to ``start + num_elems`` of each.

    Slice j is numbers j * ``slice_elems`` to (j + 1) * ``slice_elems`` of the message, cut at the message's end.
    """

    slice_elems: int
    start: int
    num_elems: int


def max_part_elems(peers: PeerBuffers, elem_bytes: int, fmt: BlockFormat | None, out_fmt: BlockFormat | None) -> int:
    """Return the longest part that fits the buffers, in whole groups of both formats and whole vectors; may be 0."""
    multiple = 128
    room_bytes = peers.send_bytes // peers.world_size // _ALIGNMENT * _ALIGNMENT  # of an entry, and of the sums
    return multiple * (room_bytes // max(_message_bytes(multiple, elem_bytes, each) for each in (fmt, out_fmt)))


def two_shot(
    x_N: Tensor,
    out_N: Tensor,
    peers: PeerBuffers,
    part: Part,
    fmt: BlockFormat | None,
    out_fmt: BlockFormat | None,
    max_polls: int,
    carried: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Sum one ``part`` of every slice of all processes' contiguous ``x_N`` to ``out_N``; all must make the same call.

    ``fmt`` and ``out_fmt`` are the formats of the entries and of the sums on the wire, None for plain numbers. ``carried`` has the
    errors of the previous encoding of entries and sums, for the whole message: added before encoding, then overwritten.
    """
    for lost, own in zip(carried, (fmt, out_fmt), strict=True):
        if own is not None:
            check_carried(lost, own, x_N.numel(), x_N.device)
        assert own is not None or lost is None, "plain numbers lose nothing"
    assert part.num_elems <= max_part_elems(peers, x_N.element_size(), fmt, out_fmt), f"{part} is too long"
    entry_bytes = -(-_message_bytes(part.num_elems, x_N.element_size(), fmt) // _ALIGNMENT) * _ALIGNMENT
    cut = x_N.numel(), part.slice_elems, part.start, part.num_elems
    sizes = header_bytes(peers.num_blocks, peers.world_size), peers.send_bytes, entry_bytes
    given = x_N, out_N, peers.addresses, peers.failure, *carried, cut, peers.rank, sizes, max_polls
    tiling = _tiling(cut, part.num_elems, peers.num_blocks, fmt, out_fmt)
    launch(two_shot_kernel, peers.num_blocks, x_N.device, *given, fmt, out_fmt, peers.world_size, tiling)


def _tiling(places: tuple[int, ...], num_elems: int, num_blocks: int, *formats: BlockFormat | None) -> Tiling:
    """Cut messages of ``num_elems`` that begin and end at these ``places``."""
    program_elems = _LONG_ELEMS if num_elems >= num_blocks * _LONG_ELEMS else _SHORT_ELEMS
    tiling = make_tiling(num_elems, *[fmt for fmt in formats if fmt is not None], program_elems=program_elems)
    # Blocks loop over rows, so whole rows may always be beyond the end.
    return replace(tiling, beyond=(ANY if any(place % tiling.elems for place in places) else ROWS).value)


def _message_bytes(num_elems: int, elem_bytes: int, fmt: BlockFormat | None) -> int:
    return num_elems * elem_bytes if fmt is None else fmt.encoded_bytes(num_elems)
