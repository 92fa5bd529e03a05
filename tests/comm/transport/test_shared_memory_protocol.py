"""Every interleaving of a few turns: no rank reads what another is writing, and none waits for ever.

A model of the protocol (``kernels/cpu/native/shared_sums.cpp``), not the code: ranks are programs of single steps, and all orders
of their steps are tried. Release and acquire order make the order of steps within a rank that of the program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Wait(NamedTuple):
    """Until rank ``peer`` has published ``turn``."""

    peer: int
    turn: int


class Write(NamedTuple):
    """Half of the buffer of ``turn``: writing takes more than one step."""

    turn: int
    half: int


class Publish(NamedTuple):
    turn: int


class Read(NamedTuple):
    """Half of what ``peer`` wrote in ``turn``."""

    peer: int
    turn: int
    half: int


Program = list[Any]


def _others(rank: int, num_ranks: int) -> list[int]:
    return [peer for peer in range(num_ranks) if peer != rank]


def one_shot(rank: int, num_ranks: int, num_turns: int) -> Program:
    """Wait for all, write, publish, wait for all, read all."""
    steps: Program = []
    for turn in range(1, num_turns + 1):
        steps += [Wait(peer, turn - 1) for peer in _others(rank, num_ranks)]
        steps += [Write(turn, 0), Write(turn, 1), Publish(turn)]
        steps += [Wait(peer, turn) for peer in _others(rank, num_ranks)]
        steps += [Read(peer, turn, half) for peer in _others(rank, num_ranks) for half in (0, 1)]
    return steps


def two_shot(rank: int, num_ranks: int, num_turns: int) -> Program:
    """Every second turn is written while the one before is read."""
    steps: Program = []
    for turn in range(1, num_turns + 1, 2):
        steps += [Wait(peer, turn - 1) for peer in _others(rank, num_ranks)]
        steps += [Write(turn, 0), Write(turn, 1), Publish(turn)]
        steps += [Wait(peer, turn) for peer in _others(rank, num_ranks)]
        for half in (0, 1):
            steps += [Read(peer, turn, half) for peer in _others(rank, num_ranks)]
            steps += [Write(turn + 1, half)]
        steps += [Publish(turn + 1)]
        steps += [Wait(peer, turn + 1) for peer in _others(rank, num_ranks)]
        steps += [Read(peer, turn + 1, half) for peer in _others(rank, num_ranks) for half in (0, 1)]
    return steps


def shift(rank: int, num_ranks: int, num_turns: int) -> Program:
    """Wait for all, write, publish, wait for the left neighbour, read it."""
    left, steps = (rank - 1) % num_ranks, []
    for turn in range(1, num_turns + 1):
        steps += [Wait(peer, turn - 1) for peer in _others(rank, num_ranks)]
        steps += [Write(turn, 0), Write(turn, 1), Publish(turn), Wait(left, turn)]
        steps += [Read(left, turn, half) for half in (0, 1)]
    return steps


def hasty(rank: int, num_ranks: int, num_turns: int) -> Program:
    """A ``shift`` that does not wait before it writes: wrong."""
    left = (rank - 1) % num_ranks
    return [step for step in shift(rank, num_ranks, num_turns) if not isinstance(step, Wait) or step.peer == left]


def unpublished(rank: int, num_ranks: int, num_turns: int) -> Program:
    """Waits for a turn that nobody will publish: wrong."""
    return [*one_shot(rank, num_ranks, num_turns), Wait((rank + 1) % num_ranks, num_turns + 1)]


def explore(programs: list[Program], num_buffers: int) -> str | None:
    """What goes wrong in some order of the steps; None: nothing. States are the ranks' places in their programs."""
    published = [
        _values(program, lambda step: step.turn if isinstance(step, Publish) else None) for program in programs
    ]
    halves = {
        (buffer, half): [
            _values(
                program,
                lambda step, b=buffer, h=half: (
                    step.turn if isinstance(step, Write) and step.turn % num_buffers == b and step.half == h else None
                ),
            )
            for program in programs
        ]
        for buffer in range(num_buffers)
        for half in (0, 1)
    }
    start = (0,) * len(programs)
    seen: set[tuple[int, ...]] = {start}
    pending: list[tuple[int, ...]] = [start]
    while pending:
        places = pending.pop()
        moved = False
        for rank, place in enumerate(places):
            if place == len(programs[rank]):
                continue
            step = programs[rank][place]
            if isinstance(step, Wait) and published[step.peer][places[step.peer]] < step.turn:
                continue
            if isinstance(step, Read):
                found = halves[step.turn % num_buffers, step.half][step.peer][places[step.peer]]
                if found != step.turn:
                    return f"rank {rank} finds turn {found} of rank {step.peer} instead of {step.turn}"
            moved = True
            after = (*places[:rank], place + 1, *places[rank + 1 :])
            if after not in seen:
                seen.add(after)
                pending.append(after)
        if not moved and any(place < len(program) for place, program in zip(places, programs, strict=True)):
            return f"nobody can go on at {places}"
    return None


def _values(program: Program, value_of: Callable[[Any], int | None]) -> list[int]:
    """The last value that the steps before each place have set, 0 at first."""
    values = [0]
    for step in program:
        value = value_of(step)
        values.append(values[-1] if value is None else value)
    return values


@pytest.mark.parametrize("make", [one_shot, two_shot, shift])
@pytest.mark.parametrize(("num_ranks", "num_turns"), [(2, 8), (3, 6), (4, 4)])
def test_two_buffers_are_enough(make: Callable[[int, int, int], Program], num_ranks: int, num_turns: int) -> None:
    assert explore([make(rank, num_ranks, num_turns) for rank in range(num_ranks)], 2) is None


@pytest.mark.parametrize(
    ("make", "num_buffers", "found"),
    [
        (one_shot, 1, "finds turn"),
        (hasty, 2, "finds turn"),
        (unpublished, 2, "nobody can go on"),
    ],
)
def test_the_search_finds_what_is_wrong(make: Callable[[int, int, int], Program], num_buffers: int, found: str) -> None:
    """One buffer, no wait before writing, a wait without an end."""
    assert found in str(explore([make(rank, 3, 4) for rank in range(3)], num_buffers))
