"""Every order in which the barrier's stores may become visible: what a process reads after it is what its peers wrote.

A model of the kernels over the barrier, not the code. A GPU may make plain stores visible in any order, and a store that
releases only after all earlier ones of its process. Loads acquire, so a process reads in the order of its program.
"""

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


Step = Store | Await | Read


def _barrier(rank: int, world_size: int, number: int, releases: bool) -> list[Step]:
    """``wait_for_peers``."""
    arrive: list[Step] = [Store(("arrival", peer, rank), number, releases) for peer in range(world_size)]
    return [*arrive, *(Await(("arrival", rank, peer), number) for peer in range(world_size))]


def one_shot(rank: int, world_size: int, num_calls: int, releases: bool) -> list[Step]:
    steps: list[Step] = []
    for call in range(1, num_calls + 1):
        steps += [Store(("send", rank, call % 2), call), *_barrier(rank, world_size, call, releases)]
        steps += [Read(("send", peer, call % 2), call) for peer in range(world_size)]
    return steps


def two_shot(rank: int, world_size: int, num_calls: int, releases: bool) -> list[Step]:
    steps: list[Step] = []
    for call in range(1, num_calls + 1):
        steps += [Store(("send", rank, call % 2), call), *_barrier(rank, world_size, 2 * call - 1, releases)]
        steps += [Read(("send", peer, call % 2), call) for peer in range(world_size)]
        steps += [Store(("sums", rank), call), *_barrier(rank, world_size, 2 * call, releases)]
        steps += [Read(("sums", peer), call) for peer in range(world_size)]
    return steps


State = tuple[tuple[int, ...], tuple[tuple[Store, ...], ...], frozenset[tuple[Any, int]]]


def explore(programs: list[list[Step]]) -> str | None:
    """What goes wrong in some order, or None. A state: places in the programs, stores under way, memory."""
    start: State = (0,) * len(programs), ((),) * len(programs), frozenset()
    seen: set[State] = {start}
    pending = [start]
    while pending:
        places, under_way, memory = pending.pop()
        found, after = dict(memory), list[State]()
        for rank, program in enumerate(programs):
            for number, store in enumerate(under_way[rank]):
                earlier = under_way[rank][:number]
                if not (earlier if store.releases else [each for each in earlier if each.place == store.place]):
                    left = (*earlier, *under_way[rank][number + 1 :])
                    kept = frozenset({**found, store.place: store.value}.items())
                    after.append((places, (*under_way[:rank], left, *under_way[rank + 1 :]), kept))
            if places[rank] == len(program):
                continue
            step, moved = program[places[rank]], (*places[:rank], places[rank] + 1, *places[rank + 1 :])
            own = next((each.value for each in reversed(under_way[rank]) if each.place == step.place), None)
            value = found.get(step.place, 0) if own is None else own
            if isinstance(step, Store):
                after.append((moved, (*under_way[:rank], (*under_way[rank], step), *under_way[rank + 1 :]), memory))
            elif isinstance(step, Read) and value != step.value:
                return f"process {rank} finds {value} instead of {step.value} at {step.place}"
            elif value >= step.value:
                after.append((moved, under_way, memory))
        if not after and any(place < len(program) for place, program in zip(places, programs, strict=True)):
            return f"nobody can go on at {places}"
        pending += [state for state in after if state not in seen]
        seen.update(after)
    return None


@pytest.mark.parametrize(("kernel", "world_size", "num_calls"), [(one_shot, 2, 5), (two_shot, 2, 3), (one_shot, 3, 1)])
def test_stores_that_release_are_enough(kernel: Any, world_size: int, num_calls: int) -> None:
    assert explore([kernel(rank, world_size, num_calls, True) for rank in range(world_size)]) is None


@pytest.mark.parametrize("kernel", [one_shot, two_shot])
def test_plain_stores_are_not(kernel: Any) -> None:
    assert "instead of" in str(explore([kernel(rank, 2, 2, False) for rank in range(2)]))
