"""One contract for every transport: bytes arrive where they should, uneven ones too, and each is counted once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import run_in_process, run_nccl_calls, run_ranks, with_throttle
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tightwire.comm.group.group import Group

OVER = {
    "gloo": run_ranks,
    "sockets": partial(run_ranks, sockets=True),
    "nccl-calls": run_nccl_calls,
    "in-process": run_in_process,
    "shared-memory": partial(run_ranks, shared_memory=True),
    "throttled": lambda world_size, fn: run_in_process(world_size, with_throttle, "1gbit,latency=10us", fn),
}


def _message(sender: int, receiver: int, num_bytes: int) -> Tensor:
    return torch.arange(num_bytes).mul(7).add(sender * 31 + receiver * 101).to(torch.uint8)


def _check_exchange(group: Group) -> None:
    rank, num_ranks = group.rank, group.world_size
    for sizes in ([5] * num_ranks, list(range(1, num_ranks + 1)), [9] + [0] * (num_ranks - 1)):
        before = group.transport.bytes_sent
        received = group.transport.exchange([_message(rank, peer, sizes[peer]) for peer in range(num_ranks)])
        assert all(torch.equal(got, _message(peer, rank, sizes[rank])) for peer, got in enumerate(received)), sizes
        assert group.transport.bytes_sent - before == sum(sizes) - sizes[rank]


def _check_gather(group: Group) -> None:
    rank, num_ranks = group.rank, group.world_size
    for sizes in (None, list(range(1, num_ranks + 1)), [9] + [0] * (num_ranks - 1), [0] * (num_ranks - 1) + [9]):
        lengths = [6] * num_ranks if sizes is None else sizes
        before = group.transport.bytes_sent
        received = group.transport.gather(_message(rank, 0, lengths[rank]), sizes)
        assert all(torch.equal(got, _message(peer, 0, lengths[peer])) for peer, got in enumerate(received)), sizes
        assert group.transport.bytes_sent - before == (num_ranks - 1) * lengths[rank]


class _LargestMade(TorchFunctionMode):
    """Elements of the largest tensor that was made meanwhile."""

    num_elems = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.num_elems = max(self.num_elems, made.numel())
        return made


def _check_memory(group: Group) -> None:
    """What one rank gives to all is not copied for each of them."""
    num_bytes, last = 1000, group.world_size - 1
    buf = _message(last, 0, num_bytes if group.rank == last else 0)
    with _LargestMade() as largest:
        group.transport.gather(buf, [0] * last + [num_bytes])
    assert largest.num_elems <= num_bytes


def _check_shift(group: Group) -> None:
    rank, num_ranks = group.rank, group.world_size
    left, right = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    before = group.transport.bytes_sent
    assert torch.equal(group.transport.shift(_message(rank, right, 8)), _message(left, rank, 8))
    assert torch.equal(group.transport.shift(_message(rank, right, rank), left), _message(left, rank, left))
    assert group.transport.bytes_sent - before == 8 + rank


def _check_deliver(group: Group) -> None:
    rank, num_ranks = group.rank, group.world_size
    for length in (
        lambda i, j: 5 * i + 3 * j,
        lambda i, j: 40 if j == i + 1 else 0,
    ):  # any lengths; to the next rank only
        before = group.transport.bytes_sent
        with group.recorded("deliver", "direct", rank):
            parts = [_message(rank, peer, length(rank, peer)) for peer in range(num_ranks)]
            received = group.transport.deliver(parts, [length(peer, rank) for peer in range(num_ranks)])
        assert all(torch.equal(got, _message(i, rank, length(i, rank))) for i, got in enumerate(received))
        assert group.transport.bytes_sent - before == sum(part.numel() for part in parts) - len(parts[rank])


def _check_ownership(group: Group) -> None:
    """A sender may overwrite its buffer at once, a receiver what it received."""
    for turn in range(20):
        mine = torch.full((1000,), group.rank + turn, dtype=torch.uint8)
        received = group.transport.gather(mine)
        expected = [peer + turn for peer in range(group.world_size)]
        assert [int(buf[-1]) for buf in received] == expected
        for buf in received:
            buf.fill_(255)
        mine.fill_(254)


def _check_barrier(group: Group) -> None:
    before = group.transport.bytes_sent
    for _ in range(5):
        group.transport.barrier()
    assert group.transport.bytes_sent == before


# Two ranks, whose neighbors on both sides are one: test_all_reduce.py has them over every transport.
@pytest.mark.parametrize(("over", "world_size"), [*((over, 3) for over in OVER), ("shared-memory", 2)])
def test_moves_and_counts_bytes(over: str, world_size: int) -> None:
    run: Callable[..., list[Any]] = OVER[over]
    run(world_size, _check_all)


def _check_all(group: Group) -> None:
    for check in (
        _check_exchange,
        _check_gather,
        _check_memory,
        _check_shift,
        _check_deliver,
        _check_ownership,
        _check_barrier,
    ):
        check(group)
