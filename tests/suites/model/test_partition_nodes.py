"""Two nodes with a real wire between them, two ranks on each: the kernel counts nothing on the wire."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Ranks
from helpers.model.partition_bodies import Work, World, build, open_peers, open_replica, settle, walk
from helpers.model.partition_checks import NUM_LAYERS, PROMPTS, plan_for
from tiny import make_tiny

from tightwire.comm.group.group import Group
from tightwire.comm.link.emulated_network import EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.streamed import StreamedWeights

pytestmark = pytest.mark.alone

_SETTLE_S = 0.2  # for the last packets
_NUM_PASSES = 5
_HOUSEKEEPING_BYTES = 1 << 14  # of a node's kernel: addresses asked for and the like


class Carried(NamedTuple):
    """Bytes that left the rank's node, by the kernel's count, and bytes that the rank sent inside it."""

    wire: int
    inside: int


@pytest.fixture(scope="module")
def network() -> Iterator[EmulatedNetwork]:
    try:
        made = EmulatedNetwork(parse_link("2gbit"))
    except NoEmulatedNetworkError as error:
        pytest.skip(f"no emulated network here: {error}")
    with made:
        yield made


def _carry(group: Group, world: World, work: Work, nodes: tuple[EmulatedNode, ...]) -> Carried:
    node = nodes[world.place(group.rank).topology.node]
    node.enter()
    peers = open_peers(replace(world, interface=node.interface), group.rank)
    peers.await_all()
    time.sleep(_SETTLE_S)
    before = _sent_over(node.interface)
    runner = build(open_replica(world, group.rank), peers, work)
    try:
        weights = runner.weights
        assert isinstance(weights, StreamedWeights)
        settle(weights)
        for _ in range(_NUM_PASSES):
            walk(runner)
        settle(weights)
        peers.await_all()
        time.sleep(_SETTLE_S)
        passed = _sent_over(node.interface)
        peers.await_all()
        return Carried(passed - before, peers.inside.bytes_sent)
    finally:
        runner.close()


def _sent_over(interface: str) -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:")


@pytest.mark.parametrize(("codec", "prepared"), [("int4", True), ("none", False)])
def test_nothing_passes_between_nodes_while_loading_and_in_passes(
    network: EmulatedNetwork, codec: str, prepared: bool, tmp_path: Path
) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS, hidden_size=256, intermediate_size=1024)
    if prepared:
        checkpoint = open_checkpoint(str(location))
        location = tmp_path / "out"
        prepare(checkpoint, location, PrepareOptions(tp=1, dtype="float32", codec=WEIGHT_CODECS[codec]))
    world = World(1, 4, num_nodes=2, store=str(tmp_path / "store"))
    work = Work(str(location), plan_for(world, codec), PROMPTS)
    with Ranks(4) as ranks:
        carried = ranks.run(_carry, world, work, network.nodes)
    for own in carried:
        assert own.wire < _HOUSEKEEPING_BYTES < own.inside / 100
