"""Runs ranks as child processes for measurements: starts them, calls a function on all, collects results, ends them.

    with LocalRanks(2, partial(open_my_group, plan)) as ranks:
        for rank, event in ranks.stream(measure, plan):       # measure(group, plan) is a generator on every rank
            ...

Functions must be at the top level of a module. Each rank computes on one thread and ends when its parent ends.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Self

import torch

from tightwire.allocator import keep_freed_memory
from tightwire.comm.group import group as group_module
from tightwire.comm.group.group import Group

_END_S = 5.0  # the time for a rank to end by itself


class LocalRankError(RuntimeError):
    """A rank raised, died or stopped responding. ``rank`` is the first one."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def fd_path(fd: int) -> str:
    """Return the path at which the ranks open an anonymous file of this process; ranks inherit no file descriptors."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def silence_after(timeout_s: float) -> float:
    """Return ``silence_s`` for ranks whose collectives time out after ``timeout_s``: two time-outs in sequence, plus 30 s."""
    return 2 * timeout_s + 30


class LocalRanks:
    """Processes of ``world_size`` ranks, each with the group that ``open_group(rank)`` returns there.

    The fork server imports the modules in ``preload`` once for all ranks, in the first call of a process. Raises LocalRankError if a
    rank does not open its group within ``silence_s``.
    """

    def __init__(
        self,
        world_size: int,
        open_group: Callable[[int], Group],
        *,
        silence_s: float = 60.0,
        preload: Sequence[ModuleType] = (),
    ) -> None:
        self.world_size = world_size
        self._silence_s = silence_s
        context = multiprocessing.get_context("forkserver")  # imports torch once, and forks no threads
        context.set_forkserver_preload([module.__name__ for module in (group_module, *preload)])  # it takes names
        self._pipes: list[Connection] = []
        self._processes = []
        try:
            _start_fork_server()
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_rank_main, args=(rank, open_group, theirs), daemon=True)
                with _ctrl_c_waits():  # `kill` must know every process that was started
                    process.start()
                    self._processes.append(process)
                theirs.close()
                self._pipes.append(ours)
            for _ in self._events(""):
                pass  # joined
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def stream(self, fn: Callable[..., Iterator[Any]], *args: Any) -> Iterator[tuple[int, Any]]:
        """Call ``fn(group, *args)`` on each rank; yield its values as (rank, value) on arrival, in order for each rank.

        Raises LocalRankError, with all ranks killed, if one raises or dies, or none sends for ``silence_s``.
        """
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank has died; reading its answer reports that
                pipe.send_bytes(call)
        return self._events(getattr(fn, "__name__", str(fn)))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)

    def close(self) -> None:
        """Let the ranks end by themselves, and kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _events(self, doing: str) -> Iterator[tuple[int, Any]]:
        ranks = dict(zip(self._pipes, range(self.world_size), strict=True))
        while ranks:
            ready = wait(list(ranks), timeout=self._silence_s)
            if not ready:
                self.kill()
                silent = sorted(ranks.values())
                raise LocalRankError(silent[0], f"ranks {silent} sent nothing for {self._silence_s:g} s in {doing}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                kind, value = self._receive(pipe, ranks[pipe])
                if kind == "event":
                    yield ranks[pipe], value
                elif kind == "done":
                    del ranks[pipe]
                else:
                    self.kill()
                    raise LocalRankError(ranks[pipe], f"rank {ranks[pipe]} of {self.world_size} {value}")

    def _receive(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_END_S)
            return "failed", f"died with exit code {process.exitcode}"


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Block Ctrl-C; one that comes meanwhile takes effect at the end. Child processes inherit the blocked signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_fork_server() -> None:
    """Start the fork server with Ctrl-C blocked: during its imports a signal would print a traceback."""
    resource_tracker.ensure_running()  # first, because starting it unblocks Ctrl-C
    with _ctrl_c_waits():
        forkserver.ensure_running()


def _rank_main(rank: int, open_group: Callable[[int], Group], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # there may be as many ranks as cores, or more
    keep_freed_memory()  # otherwise timings of large messages include page faults
    with contextlib.suppress(BrokenPipeError):
        try:
            group = open_group(rank)
        except Exception:  # noqa: BLE001, every error goes to the parent
            _send(pipe, "failed", f"could not join:\n{traceback.format_exc()}")
            return
        with group:
            _send(pipe, "done", None)
            _serve(group, pipe)


def _end_with_parent() -> None:
    # Not by a parent-death signal: this process is a child of the fork server, which ends only after its children.
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(group: Group, pipe: Connection) -> None:
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
            for value in fn(group, *args):
                _send(pipe, "event", value)
        except (EOFError, BrokenPipeError):
            return
        except Exception:  # noqa: BLE001, every error goes to the parent
            _send(pipe, "failed", f"raised:\n{traceback.format_exc()}")
            return
        _send(pipe, "done", None)


def _send(pipe: Connection, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value)))
