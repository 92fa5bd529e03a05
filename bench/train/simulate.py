"""Simulates the end times of tasks: each actor runs its tasks in order, and all actors share one link.

A task waits for other tasks, takes ``fixed_s``, then sends for ``wire_s`` if it has the link alone. Tasks that send at the same
time share the link equally.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_NO_TIME = 1e-12


class Task(NamedTuple):
    name: str
    actor: str
    after: tuple[str, ...]  # names without a task count as ended
    fixed_s: float
    wire_s: float = 0.0


def simulate(tasks: Sequence[Task]) -> dict[str, float]:
    """The end time of each task, in seconds.

    Raises:
        ValueError: tasks wait for each other.
    """
    names = {task.name for task in tasks}
    queues: dict[str, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(task.actor, deque()).append(task)
    left: dict[str, list[float]] = {}  # [fixed, wire] seconds left of running tasks
    ends: dict[str, float] = {}
    now = 0.0
    while any(queues.values()):
        running = [queue[0] for queue in queues.values() if queue and _may_run(queue[0], ends, names)]
        if not running:
            waiting = ", ".join(queue[0].name for queue in queues.values() if queue)
            raise ValueError(f"these wait for each other: {waiting}")
        for task in running:
            left.setdefault(task.name, [task.fixed_s, task.wire_s])
        sending = sum(left[task.name][0] <= _NO_TIME for task in running)
        step_s = min(_until_next(left[task.name], sending) for task in running)
        now += step_s
        for task in running:
            own = left[task.name]
            if own[0] > _NO_TIME:
                own[0] -= step_s
            else:
                own[1] -= step_s / sending
            if max(own) <= _NO_TIME:
                ends[task.name] = now
                queues[task.actor].popleft()
    return ends


def _may_run(task: Task, ends: dict[str, float], names: set[str]) -> bool:
    return all(name in ends or name not in names for name in task.after)


def _until_next(left: Sequence[float], sending: int) -> float:
    fixed_s, wire_s = left
    return fixed_s if fixed_s > _NO_TIME else max(0.0, wire_s) * sending
