"""Hosts over loopback for tests: what a side is told, free ports, and two models to agree about."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tiny import make_tiny

from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.server.config.hosts import HostOptions
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member
from tightwire.server.hosts.place import find_place
from tightwire.server.hosts.side import Joining
from tightwire.server.ipc.messages import FromRank
from tightwire.server.plan.rank_setup import RunPlan

PLAN = RunPlan(
    device="cpu", dtype="bfloat16", allreduce="auto", transport="process-group", max_model_len=512, num_blocks=64
)


def tiny_checkpoint(folder: Path, seed: int = 0) -> Checkpoint:
    return open_checkpoint(str(make_tiny(folder / f"tiny{seed}", seed=seed)))


class Told:
    """What a side has been told."""

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.messages: list[FromRank] = []
        self.exits: list[tuple[int, int]] = []
        self.ends: list[tuple[str, int, str]] = []
        self.stops: list[str] = []
        self.serving = False

    def show(self, table: str) -> None:
        self.tables.append(table)

    def hear(self, message: FromRank) -> None:
        self.messages.append(message)

    def note_exit(self, rank: int, code: int) -> None:
        self.exits.append((rank, code))

    def note_serving(self) -> None:
        self.serving = True

    def note_end(self, node: str, code: int, reason: str) -> None:
        self.ends.append((node, code, reason))

    def note_stop(self, node: str) -> None:
        self.stops.append(node)


def free_ports(count: int) -> int:
    """The first of some neighbouring free ports. Each process looks elsewhere, below the ports that systems give to connections."""
    for first in range(12_000 + os.getpid() % 250 * 64, 32_768 - count, count):
        held: list[socket.socket] = []
        try:
            held.extend(socket.create_server(("127.0.0.1", first + i)) for i in range(count))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def joining(node: int, port: int, told: Told, num_nodes: int = 2, changed: Mapping[str, str] | None = None) -> Joining:
    options = HostOptions(
        nnodes=num_nodes,
        node_rank=node,
        master_addr=f"127.0.0.1:{port}",
        port_range=f"{port + 1}-{port + 1 + 2 * num_nodes}",
    )
    facts = {"version": "1", "kernels": "v4", "--tp": "2", "--port-range": options.port_range, **(changed or {})}
    return Joining(find_place(options), range(node, node + 1), facts, told, 5.0, 8.0)


@asynccontextmanager
async def two_hosts(told: Told | None = None) -> AsyncIterator[tuple[Head, Member, int]]:
    """Node 0 and node 1, which have joined, and node 0's port. ``told``: what node 0 is told."""
    port = free_ports(6)
    head, member = Head(joining(0, port, told or Told())), Member(joining(1, port, Told()))
    with socket.create_server(("127.0.0.1", port + 1)):  # rank 0's store, which its parent opens
        await asyncio.gather(head.join(), member.join())
        yield head, member, port
        await head.close()
        await member.close()


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
