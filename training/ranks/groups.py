"""Opens the process groups of training: one set of connections per thread, so that threads do not block each other.

A *lane group* contains all ranks and, on several nodes, the smaller groups inside and across nodes. Between steps the gather lane is idle;
the engine that answers prompts may gather over its group then. ``Control`` exchanges small values
outside the engine, over a group of its own.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.collectives.all_gather import all_gather
from tightwire.comm.group.group import Group, in_process_groups, open_process_group
from tightwire.comm.group.nodes import join_nodes
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport.deadline import within
from tightwire.training.config.sharding import Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainGroups:
    """This rank's three lane groups, which differ only in their connections. Each has one ledger of its collectives."""

    gather: Group
    reduce: Group
    main: Group

    @property
    def world_size(self) -> int:
        return self.main.world_size

    @property
    def num_nodes(self) -> int:
        return 1 if self.main.nodes is None else self.main.nodes.across.world_size

    @property
    def device(self) -> torch.device:
        return self.main.device

    def close(self) -> None:
        """Close all connections without waiting for other ranks. May be called twice."""
        for group in (self.gather, self.reduce, self.main):
            group.close()


def shard_group(lane: Group, sharding: Sharding) -> Group:
    """The ranks of a lane group that buckets are sharded over."""
    if sharding.shard_over == "self":
        return _alone(lane)
    return lane.nodes.inside if sharding.shard_over == "node" and lane.nodes is not None else lane


def replica_group(lane: Group, sharding: Sharding) -> Group:
    """The ranks of a lane group that hold the same shard as this one; the gradient compressor sums over them."""
    if sharding.shard_over == "self":
        return lane
    return lane.nodes.across if sharding.shard_over == "node" and lane.nodes is not None else _alone(lane)


def rollout_group(lane: Group, num_ranks: int) -> Group:
    """The ranks of a lane group that answer prompts together: all, those of this rank's node, or this one."""
    if num_ranks == lane.world_size:
        return lane
    return _alone(lane) if num_ranks == 1 or lane.nodes is None else lane.nodes.inside


def open_train_groups(
    topology: Topology, *, store: Store, device: torch.device, timeout_s: float, interface: str | None = None
) -> TrainGroups:
    """Connect the processes once per lane; arguments and errors as for ``comm.group.group.open_process_group``."""

    def join(lane: str) -> Group:
        how: dict[str, Any] = {"name": f"train/{lane}", "interface": interface}
        group = open_process_group(topology, store=store, device=device, timeout_s=timeout_s, **how)
        return join_nodes(group, topology, store=store, **how)

    return TrainGroups(**{lane: join(lane) for lane in ("gather", "reduce", "main")})


def _alone(lane: Group) -> Group:
    return replace(in_process_groups(1, lane.timeout_s, [lane.ledger])[0], device=lane.device)


def open_store(environment: Mapping[str, str], topology: Topology, *, timeout_s: float) -> Store:
    """The store through which ranks connect: torchrun's agent serves it if its variables say so, else rank 0.

    Each restart by torchrun has its own keys. Raises ValueError: there are several ranks, and the address is missing or
    invalid; ConnectionError: no store can be reached or opened there.
    """
    if topology.world_size == 1:
        return HashStore()
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(
            f"there are {topology.world_size} ranks, and MASTER_ADDR and MASTER_PORT are not set; start the ranks "
            "with torchrun"
        )
    agent_has_it = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = topology.rank == 0 and not agent_has_it
    try:
        timeout = timedelta(seconds=timeout_s)
        connect = partial(TCPStore, host, int(port), is_master=is_master, timeout=timeout, wait_for_workers=False)
        # Torch's own deadline ends with the connection: what accepts it and is no store would never answer.
        store = within(timeout_s, connect, lambda: f"no answer in {timeout_s:g} s")
    except RuntimeError as error:
        wrong = "a port that is free on it" if is_master else "its port, and it must be running"
        raise ConnectionError(
            f"ranks cannot connect at MASTER_ADDR={host} MASTER_PORT={port}: {str(error).rstrip('.')}. They must name the first "
            f"rank's machine and {wrong}"
        ) from None
    return PrefixStore(f"attempt-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class Control:
    """Gathers values from all ranks. All ranks call the same methods in the same order."""

    def __init__(self, group: Group) -> None:
        self._group, self.rank, self.world_size = group, group.rank, group.world_size

    def gather_numbers(self, *numbers: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks, in rank order; all pass equally many. Cost: 8 (W-1) bytes a number, one round."""
        rows = all_gather(self._group, torch.tensor(numbers, dtype=torch.float64, device=self._group.device))
        return [tuple(row.tolist()) for row in rows]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, pickled. Cost: (W-1) times the largest pickle, two rounds."""
        data = pickle.dumps(value)
        longest = int(max(length for (length,) in self.gather_numbers(len(data))))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._group.device)
        return [pickle.loads(bytes(row.cpu().numpy())) for row in all_gather(self._group, padded)]

    @contextmanager
    def failing_together(self, *expected: type[Exception]) -> Iterator[None]:
        """Raise any rank's first ``expected`` exception on all ranks, so that none waits. Cost: a ``gather``."""
        own = None
        try:
            yield
        except expected as error:
            own = error
        for error in self.gather(own):
            if error is not None:
                raise error

    def close(self) -> None:
        self._group.close()
