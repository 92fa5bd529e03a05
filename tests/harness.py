"""Ranks for tests: real processes over gloo (``run_ranks``, ``Ranks``) or threads of this process (``run_in_process``).

A rank function is a module-level function ``fn(group, *args)``; it and its arguments and results are pickled. Processes
are forked from a server that has imported torch once, so a rank starts in milliseconds instead of seconds.

    results = run_ranks(2, _sum_ones)                  # one call, processes started and ended
    with Ranks(4) as ranks:                            # several calls on the same processes and group
        first = ranks.run(_sum_ones)
"""

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.nodes import in_process_node_groups, join_nodes
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import parse_link
from tightwire.comm.transport.emulated import ThrottledTransport
from tightwire.comm.transport.process_group import GlooTransport, NcclTransport
from tightwire.comm.transport.segment import CHUNK_BYTES, make_segment
from tightwire.comm.transport.socket_join import SocketOptions

_Result = TypeVar("_Result")

_LINK = "40gbit,latency=2us"
SECRET = b"a secret of tests"


class RankFailedError(AssertionError):
    """A rank function raised, or its process died. The message holds the first rank's traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    collective_timeout_s: float = 30.0,
    shared_memory: bool = False,
    sockets: bool = False,
    num_nodes: int = 1,
) -> list[Any]:
    """Run ``fn(group, *args)`` in ``world_size`` processes joined over gloo or ``sockets``; their results in rank order.

    With ``num_nodes`` the ranks are treated as on that many nodes; ``shared_memory`` then joins those of each node too,
    or only those if the nodes are joined by ``sockets``.

    Raises:
        RankFailedError: with the traceback of the first rank that raised or the exit code of one that died; the other
            processes have been killed.
        TimeoutError: not all were done after ``timeout_s``; all have been killed.
    """
    with Ranks(
        world_size,
        collective_timeout_s=collective_timeout_s,
        shared_memory=shared_memory,
        sockets=sockets,
        num_nodes=num_nodes,
    ) as ranks:
        return ranks.run(fn, *args, timeout_s=timeout_s)


def run_in_process(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0, num_nodes: int = 1
) -> list[Any]:
    """Run ``fn(group, *args)`` in ``world_size`` threads; their results in rank order, or the first one's exception."""

    def run_rank(group: Group) -> Any:
        # A group that closes frees the other threads at once when this one raises.
        with group:
            return fn(group, *args)

    groups = in_process_node_groups(world_size, num_nodes, timeout_s)
    return run_threads([partial(run_rank, group) for group in groups])


def run_threads(fns: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Each in a thread of its own, all at once; their results in order, or the exception that came first.

    Each frees the others when it ends: what waits for one that has failed fails too.
    """
    with ThreadPoolExecutor(len(fns)) as pool:
        futures = [pool.submit(fn) for fn in fns]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CommError)):
        raise error  # what went wrong first; CommErrors are what the others saw of it
    return [future.result() for future in futures]


def fork_server() -> ForkServerContext:
    """The context whose processes are forked from a server that has imported torch, unless a test has started one without."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tightwire.comm.group.nodes", "tightwire.comm.all_reduce.make"])
    return context


def run_nccl_calls(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Like ``run_ranks``, with the NCCL transport, whose calls gloo has too, in place of gloo's own."""
    return run_ranks(world_size, with_nccl_calls, fn, *args)


def with_nccl_calls(group: Group, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` over the group of ``run_nccl_calls``, made of a gloo group."""
    gloo = group.transport
    assert isinstance(gloo, GlooTransport)
    transport = NcclTransport(
        gloo._group,
        gloo._notes,
        rank=group.rank,
        world_size=group.world_size,
        device=group.device,
        timeout_s=group.timeout_s,
        ledger=group.ledger,
    )
    transport.barrier()
    return fn(replace(group, transport=transport), *args)


def with_throttle(group: Group, link: str, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` over ``group`` behind a link of that name."""
    return fn(replace(group, transport=ThrottledTransport(group.transport, parse_link(link))), *args)


class Ranks:
    """``world_size`` processes that hold one group and run functions until closed. A failure ends them all."""

    def __init__(
        self,
        world_size: int,
        *,
        collective_timeout_s: float = 30.0,
        shared_memory: bool = False,
        sockets: bool = False,
        chunk_bytes: int = 0,
        num_nodes: int = 1,
    ) -> None:
        self.world_size = world_size
        sizes = [world_size] + [world_size // num_nodes] * (num_nodes if num_nodes > 1 else 0)
        # The whole group's segment, then each node's.
        self._segment_fds = [make_segment(size, chunk_bytes or CHUNK_BYTES) for size in sizes if shared_memory]
        context = fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="tightwire-ranks-")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(
                    Topology(rank, world_size, num_nodes=num_nodes),
                    f"{self._folder.name}/store",
                    collective_timeout_s,
                    self._segment_paths,
                    SocketOptions(SECRET) if sockets else None,
                    theirs,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    @property
    def _segment_paths(self) -> list[str]:
        """Where the ranks, which inherit nothing from this process, find its segments."""
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._segment_fds]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """``fn(group, *args)`` on every rank; results in rank order. Raises as ``run_ranks`` does."""
        results: dict[int, Any] = {}
        for rank, outcome in self._outcomes(fn, args, timeout_s):
            if isinstance(outcome, RankFailedError):
                self.kill()
                raise outcome
            results[rank] = outcome
        if len(results) < self.world_size:
            self.kill()
            late = sorted(set(range(self.world_size)) - set(results))
            raise TimeoutError(f"{fn.__qualname__}: ranks {late} were not done after {timeout_s:g} s")
        return [results[rank] for rank in range(self.world_size)]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, enough: int | None = None, timeout_s: float = 60.0
    ) -> dict[int, Any]:
        """Like ``run`` for tests that break ranks on purpose: each rank's result or RankFailedError, first come first.

        Returns when ``enough`` ranks (default: all) have answered; those not done after ``timeout_s`` are absent.
        """
        return dict(islice(self._outcomes(fn, args, timeout_s), enough))

    def _outcomes(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Iterator[tuple[int, Any]]:
        call = pickle.dumps((_where(fn), pickle.dumps(args)))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        pending = dict(zip(self._pipes, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout_s
        while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                yield rank, self._outcome(rank)

    def _outcome(self, rank: int) -> Any:
        try:
            ok, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return RankFailedError(rank, f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        return value if ok else RankFailedError(rank, f"rank {rank} raised:\n{value}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End the processes; those that do not end by themselves within seconds are killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()
        while self._segment_fds:
            os.close(self._segment_fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Over(NamedTuple):
    """A transport at a world size: in-process, gloo, sockets, shared-memory, nccl-calls or throttled (memory behind a link).

    On several nodes, shared memory joins the ranks of each, and gloo or sockets the nodes.
    """

    transport: str
    world_size: int
    num_nodes: int = 1

    def __str__(self) -> str:
        nodes = f"-on-{self.num_nodes}-nodes" if self.num_nodes > 1 else ""
        return f"{self.transport}-{self.world_size}{nodes}"


class Runner:
    """Runs functions on ranks ``over`` a transport; keeps the processes from one test to the next, until closed."""

    def __init__(self, over: Over) -> None:
        self.over = over
        self._ranks: Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(group, *args)`` on every rank; results in rank order. Raises as ``run_ranks`` and ``run_in_process`` do."""
        transport, world_size, num_nodes = self.over
        if transport == "in-process":
            return run_in_process(world_size, fn, *args, num_nodes=num_nodes)
        if self._ranks is None:
            sockets = transport == "sockets"
            shared_memory = transport in ("shared-memory", "throttled") or (sockets and num_nodes > 1)
            self._ranks = Ranks(world_size, shared_memory=shared_memory, sockets=sockets, num_nodes=num_nodes)
        try:
            if transport == "nccl-calls":
                return self._ranks.run(with_nccl_calls, fn, *args)
            if transport == "throttled":
                return self._ranks.run(with_throttle, _LINK, fn, *args)
            return self._ranks.run(fn, *args)
        except BaseException:
            self.close()  # a failure ends the ranks; the next test starts others
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _rank_main(
    topology: Topology,
    store_path: str,
    collective_timeout_s: float,
    segment_paths: list[str],
    sockets: SocketOptions | None,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)  # as many ranks as cores, or more
    try:
        store = FileStore(store_path, topology.world_size)
        group = open_process_group(
            topology,
            store=store,
            device=torch.device("cpu"),
            timeout_s=collective_timeout_s,
            join_timeout_s=30.0,
            segment_fd=os.open(segment_paths[0], os.O_RDWR) if segment_paths and sockets is None else None,
            sockets=sockets,
        )
        if topology.num_nodes > 1:
            own = os.open(segment_paths[1 + topology.node], os.O_RDWR) if segment_paths else None
            group = join_nodes(group, topology, store=store, join_timeout_s=30.0, segment_fd=own, sockets=sockets)
    except Exception:  # noqa: BLE001, whatever it is goes to the parent
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    with group:
        while True:
            try:
                where, args = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                outcome = pickle.dumps((True, load_function(*where)(group, *pickle.loads(args))))
            except Exception:  # noqa: BLE001, whatever it is goes to the parent
                outcome = pickle.dumps((False, traceback.format_exc()))
            try:
                pipe.send_bytes(outcome)
            except OSError:
                return  # the test has gone on without this rank


def _where(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Module name, file and qualified name: test modules imported by path cannot be found by name in a new process."""
    file = sys.modules[fn.__module__].__file__
    if file is None or "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} must be a module-level function, so that other processes can import it")
    return fn.__module__, str(Path(file).resolve()), fn.__qualname__


def load_function(name: str, path: str, qualname: str) -> Callable[..., Any]:
    """A function of a module that is imported by path, under ``name``."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"cannot load {path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[name]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
