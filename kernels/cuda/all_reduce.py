"""AllReduces as one kernel per process, over memory that all processes map.

Every process owns a *peer buffer*: the header of ``barrier``, two send buffers, and one for its sums. A kernel

    one-shot    copies its numbers into its send buffer | waits | adds all processes' numbers
    two-shot    copies them, one slot for each process  | waits | adds its own slot and publishes the sums | waits |
                collects all sums. With a format for either leg its slots and sums are ``block_quant``'s bytes: flash

Sums are float32 in the processes' order, rounded once; a quantized slice goes through its owner's bytes too. So all
processes get the same bits, those of the generic algorithms (comm/all_reduce).

There is no wait at the end: call n sends from buffer n % 2. Before kernel n + 2 writes that buffer again, kernel n + 1 has
passed a barrier with the peers' kernels n + 1, which began after their kernels n ended. Likewise a slot of sums is written
after the first barrier of a call, when the peers have finished the call before. Therefore every block takes part in every
call, even with nothing to do, and one stream runs all calls of a process. Calls are counted on the device, so a captured
CUDA graph can be replayed among other calls.

A block reads only what blocks of the same number wrote, in any process; blocks do not wait for other blocks. The buffers
limit the message of a launch; ``comm.transport.peer_all_reduce`` cuts longer ones.
"""

from dataclasses import dataclass

from torch import Tensor

from tightwire.kernels.cuda.all_reduce_kernels import one_shot_kernel, two_shot_kernel
from tightwire.kernels.cuda.barrier import header_bytes
from tightwire.kernels.cuda.block_quant import TilePlan
from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import ANY, ROWS
from tightwire.kernels.spec.block_format import BlockFormat

_ALIGNMENT = 128  # of slots, in bytes
# Numbers per block and iteration: few for short messages, which would not occupy all blocks otherwise.
_SHORT_ELEMS, _LONG_ELEMS = 1024, 4096


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """A process's view of all processes' peer buffers.

    Args:
        addresses: (W,) int64 on the kernels' device: the start of each process's buffer, as this process maps it.
        rank: of this process.
        send_bytes: size of a send buffer; the buffer for the sums holds a W-th of it.
        num_blocks: of every launch; at most what the device runs at once.
        failure: one int32 that the kernels write and the host reads without synchronizing (pinned memory): 0, or a bit
            for each process that was late.
        memory: an object that must live as long as the addresses.
    """

    addresses: Tensor
    rank: int
    send_bytes: int
    num_blocks: int
    failure: Tensor
    memory: object

    @property
    def world_size(self) -> int:
        return self.addresses.numel()

    @property
    def sums_bytes(self) -> int:
        return self.send_bytes // self.world_size // _ALIGNMENT * _ALIGNMENT


def buffer_bytes(send_bytes: int, num_blocks: int, world_size: int) -> int:
    """Size of one process's peer buffer. It must be zero before the first call of any process."""
    return header_bytes(num_blocks, world_size) + 2 * send_bytes + send_bytes // world_size


def one_shot(x_N: Tensor, out_N: Tensor, peers: PeerBuffers, max_polls: int) -> None:
    """``out_N`` = the sum of all processes' contiguous ``x_N``, at most ``peers.send_bytes`` long; all call alike."""
    assert 0 < x_N.nbytes <= peers.send_bytes, f"{x_N.nbytes} B in a buffer of {peers.send_bytes}"
    plan = _plan(x_N.numel(), peers.num_blocks)
    sizes = header_bytes(peers.num_blocks, peers.world_size), peers.send_bytes
    given = x_N, out_N, peers.addresses, peers.failure, x_N.numel(), peers.rank, *sizes, max_polls
    launch(one_shot_kernel, peers.num_blocks, x_N.device, *given, peers.world_size, *_sizes(plan, x_N.numel()))


@dataclass(frozen=True, slots=True)
class Part:
    """The part of every process's slice that one launch handles: numbers ``start`` to ``start + num_elems`` of each.

    Slice j is numbers j * ``slice_elems`` to (j + 1) * ``slice_elems`` of the message, as far as there are any.
    """

    slice_elems: int
    start: int
    num_elems: int


def max_part_elems(peers: PeerBuffers, elem_bytes: int, fmt: BlockFormat | None, out_fmt: BlockFormat | None) -> int:
    """The longest part that the buffers hold, in whole groups of both formats and whole vectors; may be 0."""
    multiple = 128
    slot_bytes = peers.send_bytes // peers.world_size // _ALIGNMENT * _ALIGNMENT
    return multiple * min(
        slot_bytes // _message_bytes(multiple, elem_bytes, fmt),
        peers.sums_bytes // _message_bytes(multiple, elem_bytes, out_fmt),
    )


def two_shot(
    x_N: Tensor,
    out_N: Tensor,
    peers: PeerBuffers,
    part: Part,
    fmt: BlockFormat | None,
    out_fmt: BlockFormat | None,
    max_polls: int,
) -> None:
    """Fill one ``part`` of every slice of ``out_N`` with the sums of all processes' contiguous ``x_N``; all call alike.

    Args:
        fmt: of the slots on the wire; None: plain numbers.
        out_fmt: of the sums on the wire; None: rounded to the numbers' type.
    """
    assert part.num_elems <= max_part_elems(peers, x_N.element_size(), fmt, out_fmt), f"{part} is too long"
    plan = _plan(part.num_elems, peers.num_blocks, fmt, out_fmt)
    slot_bytes = -(-_message_bytes(part.num_elems, x_N.element_size(), fmt) // _ALIGNMENT) * _ALIGNMENT
    cut = x_N.numel(), part.slice_elems, part.start, part.num_elems
    sizes = header_bytes(peers.num_blocks, peers.world_size), peers.send_bytes, slot_bytes
    given = x_N, out_N, peers.addresses, peers.failure, *cut, peers.rank, *sizes, max_polls
    shape = _sizes(plan, x_N.numel(), part.slice_elems, part.start, part.num_elems)
    launch(two_shot_kernel, peers.num_blocks, x_N.device, *given, fmt, out_fmt, peers.world_size, *shape)


def _plan(num_elems: int, num_blocks: int, *formats: BlockFormat | None) -> TilePlan:
    given = [fmt for fmt in formats if fmt is not None]
    return TilePlan(*given, program_elems=_LONG_ELEMS if num_elems >= num_blocks * _LONG_ELEMS else _SHORT_ELEMS)


def _sizes(plan: TilePlan, *lengths: int) -> tuple[int, int, int, int]:
    """ROWS, ELEMS, TILES and BEYOND of kernels whose messages begin and end at these ``lengths``."""
    beyond = ANY if any(length % plan.elems for length in lengths) else ROWS
    return plan.rows, plan.elems, plan.num_tiles, beyond.value


def _message_bytes(num_elems: int, elem_bytes: int, fmt: BlockFormat | None) -> int:
    return num_elems * elem_bytes if fmt is None else fmt.encoded_bytes(num_elems)
