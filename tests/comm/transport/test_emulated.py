"""A throttled transport gives the same results, never earlier than its link allows; a transport without cost runs every algorithm."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import run_in_process, run_threads

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.errors import PeerLostError
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.group.nodes import held_rate, throttle_group
from tightwire.comm.link.link import parse_link
from tightwire.comm.transport.emulated import AloneTransport, ThrottledTransport

pytestmark = pytest.mark.alone

NUM_BYTES = 100_000


def _throttled(group: Group, link: str) -> ThrottledTransport:
    return ThrottledTransport(group.transport, parse_link(link))


def _call(group: Group, link: str, method: str) -> tuple[float, float, int]:
    """When a call began and ended, and the bytes it sent."""
    transport = _throttled(group, link)
    buf = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    start = time.perf_counter()
    if method == "exchange":
        transport.exchange([buf] * group.world_size)
    elif method == "gather":
        transport.gather(buf)
    elif method == "shift":
        transport.shift(buf)
    else:
        transport.all_reduce(buf.view(torch.bfloat16))
    return start, time.perf_counter(), transport.bytes_sent


@pytest.mark.parametrize(("method", "rounds"), [("exchange", 1), ("gather", 1), ("shift", 1), ("all_reduce", 4)])
def test_bytes_and_rounds_take_their_time(method: str, rounds: int) -> None:
    for start, end, sent in run_in_process(3, _call, "80mbit,latency=2ms", method):
        assert end - start >= sent / 10e6 + rounds * 2e-3


def _send_from_rank_0(group: Group) -> tuple[float, float]:
    transport = _throttled(group, "80mbit,latency=2ms")
    start = time.perf_counter()
    sizes = [NUM_BYTES if rank == 0 else 0 for rank in range(group.world_size)]
    transport.gather(torch.zeros(sizes[group.rank], dtype=torch.uint8), sizes)
    return start, time.perf_counter()


def test_who_sends_nothing_waits_for_what_it_receives() -> None:
    (sent_from, _), *others = run_in_process(3, _send_from_rank_0)
    for _, received in others:
        assert received - sent_from >= 2 * NUM_BYTES / 10e6 + 2e-3


def _twice(group: Group) -> float:
    """Two calls at once, as fast as the caller can make them."""
    transport = _throttled(group, "80mbit")
    start = time.perf_counter()
    for _ in range(2):
        transport.gather(torch.zeros(NUM_BYTES, dtype=torch.uint8))
    return time.perf_counter() - start


def test_calls_queue_for_the_link() -> None:
    assert all(seconds >= 2 * NUM_BYTES / 10e6 for seconds in run_in_process(2, _twice))


def _through_messages(group: Group) -> tuple[bool, list[float]]:
    transport = _throttled(group, "latency=1us")
    behind = replace(group, transport=transport)
    return transport.fused is None, make_all_reduce("one-shot", behind)(torch.ones(3)).tolist()


def test_no_kernel_passes_the_link_by() -> None:
    assert run_in_process(2, _through_messages) == [(True, [2.0] * 3)] * 2


def _miss_a_peer(group: Group) -> str:
    transport = _throttled(group, "1gbit")
    if group.rank == 1:
        transport.close()
        return ""
    with pytest.raises(PeerLostError) as caught:
        transport.barrier()
    return str(caught.value)


def test_a_lost_peer_is_named_through_the_link() -> None:
    assert "lost rank 1" in run_in_process(2, _miss_a_peer)[0]


def _hold(group: Group, link: str) -> float:
    slow = throttle_group(group, parse_link(link))
    return held_rate(slow, parse_link(link))


@pytest.mark.parametrize(("link", "rate"), [("80mbit,latency=2ms", 10e6), ("pcie6x16", 121e9)])
def test_all_ranks_learn_the_rate_that_the_slowest_holds(link: str, rate: float) -> None:
    told = run_in_process(3, _hold, link)
    assert told[0] == told[1] == told[2] <= rate
    if link == "pcie6x16":  # which no memory here carries
        assert told[0] < 0.9 * rate


def _throttle_nodes(group: Group) -> list[bool]:
    slow = throttle_group(group, parse_link("1gbit"))
    assert slow.nodes is not None
    groups = (slow, slow.nodes.across, slow.nodes.inside)
    return [isinstance(group.transport, ThrottledTransport) for group in groups]


def test_between_nodes_is_slow_and_inside_is_not() -> None:
    assert run_in_process(4, _throttle_nodes, num_nodes=2) == [[True, True, False]] * 4


@pytest.mark.parametrize("name", ["one-shot", "two-shot", "ring", "flash-int8", "flash:int6-g64,none"])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_all_reduce_adds_this_ranks_own_numbers(name: str, rank: int) -> None:
    group = in_process_groups(3)[rank]
    alone = replace(group, transport=AloneTransport(rank, 3), nodes=None)
    total = make_all_reduce(name, alone)(torch.ones(1000))
    assert total.shape == (1000,) and bool(total.isfinite().all()) and alone.bytes_sent == 0
    if name == "one-shot":
        assert torch.equal(total, torch.full((1000,), 3.0))


def test_transports_of_one_rank_share_its_link() -> None:
    link, alone = parse_link("10MB/s"), AloneTransport(0, 2)
    first = ThrottledTransport(alone, link)
    second, buf = ThrottledTransport(alone, link, first), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    start_s = time.perf_counter()
    run_threads([partial(transport.gather, buf) for transport in (first, second)])
    assert time.perf_counter() - start_s >= 2 * NUM_BYTES / 10e6
