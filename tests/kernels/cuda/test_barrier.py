"""Every order in which the barrier's stores may become visible: what a process reads after it is what its peers wrote.

A model of the kernels over the barrier, not the code. A GPU may make plain stores visible in any order. A store that releases
becomes visible after all earlier ones of its thread, and after those that other threads of the block made before both met
(``bar.sync``). Loads acquire, so a thread reads in the order of its program.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import pytest


class Store(NamedTuple):
    place: tuple[Any, ...]
    value: int
    releases: bool = False


class Await(NamedTuple):
    """Until a place holds ``value`` or a later one."""

    place: tuple[Any, ...]
    value: int


class Read(NamedTuple):
    """A load that must find exactly ``value``."""

    place: tuple[Any, ...]
    value: int


class Meet(NamedTuple):
    """Until all threads of the process come here."""


Step = Store | Await | Read | Meet


class Form(NamedTuple):
    """``num_sends``: buffers that calls take in turn. ``releases``: arrivals are stores that release."""

    world_size: int
    num_calls: int
    num_threads: int = 1
    num_sends: int = 2
    releases: bool = True


def _barrier(rank: int, thread: int, number: int, form: Form) -> list[Step]:
    """``wait_for_peers``, whose first thread arrives and waits."""
    ranks, meet = range(form.world_size), [Meet()] * (form.num_threads > 1)
    if thread:
        return [*meet, *meet]
    arrive: list[Step] = [Store(("arrival", peer, rank), number, form.releases) for peer in ranks]
    return [*meet, *arrive, *(Await(("arrival", rank, peer), number) for peer in ranks), *meet]


def one_shot(rank: int, thread: int, form: Form) -> list[Step]:
    """A thread writes one place and reads the one that the next thread of each process wrote."""
    steps, read = list[Step](), (thread + 1) % form.num_threads
    for call in range(1, form.num_calls + 1):
        buffer = call % form.num_sends
        steps += [Store(("send", rank, buffer, thread), call), *_barrier(rank, thread, call, form)]
        steps += [Read(("send", peer, buffer, read), call) for peer in range(form.world_size)]
    return steps


def two_shot(rank: int, thread: int, form: Form) -> list[Step]:
    steps, read = list[Step](), (thread + 1) % form.num_threads
    for call in range(1, form.num_calls + 1):
        buffer = call % form.num_sends
        steps += [Store(("send", rank, buffer, thread), call), *_barrier(rank, thread, 2 * call - 1, form)]
        steps += [Read(("send", peer, buffer, read), call) for peer in range(form.world_size)]
        steps += [Store(("sums", rank, thread), call), *_barrier(rank, thread, 2 * call, form)]
        steps += [Read(("sums", peer, read), call) for peer in range(form.world_size)]
    return steps


class _Pending(NamedTuple):
    """A store that is not visible yet to other processes; ``meetings`` its thread had before."""

    thread: int
    meetings: int
    store: Store

    def is_before(self, thread: int, meetings: int) -> bool:
        """Whether it comes before what ``thread`` does after so many meetings."""
        return self.thread == thread or self.meetings < meetings


# Of each process: places in its threads' programs, and its stores under way. Then memory.
_Process = tuple[tuple[int, ...], tuple[_Pending, ...]]
State = tuple[tuple[_Process, ...], frozenset[tuple[Any, int]]]


def explore(kernel: Callable[[int, int, Form], list[Step]], form: Form, *, cumulative: bool = True) -> str | None:
    """What goes wrong in some order, or None. ``cumulative``: a release covers stores of threads that met its own."""
    threads, ranks = range(form.num_threads), range(form.world_size)
    programs = [[kernel(rank, thread, form) for thread in threads] for rank in ranks]
    num_meetings = [[*accumulate((type(step) is Meet for step in each), initial=0)] for each in programs[0]]
    start: State = (((0,) * form.num_threads, ()),) * form.world_size, frozenset()
    seen: set[State] = {start}
    pending = [start]
    while pending:
        processes, memory = pending.pop()
        found, after = dict(memory), list[State]()

        def put(rank: int, process: _Process, memory: frozenset[tuple[Any, int]]) -> None:
            after.append(((*processes[:rank], process, *processes[rank + 1 :]), memory))  # noqa: B023

        for rank, (places, under_way) in enumerate(processes):
            for number, one in enumerate(under_way):
                meetings = one.meetings if cumulative else 0
                if not any(
                    (one.store.releases or each.store.place == one.store.place) and each.is_before(one.thread, meetings)
                    for each in under_way[:number]
                ):
                    kept = frozenset({**found, one.store.place: one.store.value}.items())
                    put(rank, (places, (*under_way[:number], *under_way[number + 1 :])), kept)
            steps = [program[place : place + 1] for program, place in zip(programs[rank], places, strict=True)]
            if all(step and isinstance(step[0], Meet) for step in steps):
                put(rank, (tuple(place + 1 for place in places), under_way), memory)
            for thread in threads:
                if not steps[thread] or isinstance(step := steps[thread][0], Meet):
                    continue
                meetings = num_meetings[thread][places[thread]]
                moved = (*places[:thread], places[thread] + 1, *places[thread + 1 :])
                own = [each.store for each in under_way if each.is_before(thread, meetings)]
                value = next((each.value for each in own[::-1] if each.place == step.place), found.get(step.place, 0))
                if isinstance(step, Store):
                    put(rank, (moved, (*under_way, _Pending(thread, meetings, step))), memory)
                elif isinstance(step, Read) and value != step.value:
                    return f"process {rank} finds {value} instead of {step.value} at {step.place}"
                elif value >= step.value:
                    put(rank, (moved, under_way), memory)
        ended = all(
            place == len(program)
            for own, (places, _) in zip(programs, processes, strict=True)
            for program, place in zip(own, places, strict=True)
        )
        if not after and not ended:
            return f"nobody can go on at {[places for places, _ in processes]}"
        pending += [state for state in after if state not in seen]
        seen.update(after)
    return None


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        (one_shot, Form(2, 5)),
        (two_shot, Form(2, 3)),
        (one_shot, Form(3, 1)),
        (two_shot, Form(3, 1)),
        (one_shot, Form(2, 3, num_threads=2)),
        (two_shot, Form(2, 2, num_threads=2)),
    ],
)
def test_stores_that_release_are_enough(kernel: Any, form: Form) -> None:
    assert explore(kernel, form) is None


@pytest.mark.parametrize("kernel", [one_shot, two_shot])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_plain_stores_are_not(kernel: Any, num_threads: int) -> None:
    assert "instead of" in str(explore(kernel, Form(2, 2, num_threads, releases=False)))


@pytest.mark.parametrize("kernel", [one_shot, two_shot])
def test_releases_of_one_threads_own_stores_are_not(kernel: Any) -> None:
    """What the other threads wrote before all met must be there too."""
    assert "instead of" in str(explore(kernel, Form(2, 1, num_threads=2), cumulative=False))


def test_one_buffer_for_all_calls_is_not_enough() -> None:
    """A process writes its next numbers when a peer still reads these. A second barrier lies between, in two-shot."""
    assert "finds 2 instead of 1" in str(explore(one_shot, Form(2, 2, num_sends=1)))
    assert explore(two_shot, Form(2, 2, num_sends=1)) is None
