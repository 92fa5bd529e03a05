"""Two nodes with a real wire between them, two ranks on each: what the kernel counts is the formula, and then nothing."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Ranks
from helpers.comm.partition_bodies import Work, World, build, open_peers, open_replica, settle, walk
from helpers.comm.partition_checks import NUM_LAYERS, PROMPTS, first_touch_bytes, open_images, plan_for
from tiny import make_tiny

from tightwire.comm.group.group import Group
from tightwire.comm.link.emulated_network import EmulatedNetwork, EmulatedNode, NoEmulatedNetworkError
from tightwire.comm.link.link import parse_link
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights.residency import FILES, FIRST_TOUCH
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

pytestmark = pytest.mark.alone

_SETTLE_S = 0.2  # for the last packets
_NUM_PASSES = 5
_HOUSEKEEPING_BYTES = 1 << 14  # of a node's kernel: addresses asked for and the like


class Carried(NamedTuple):
    """Bytes that left the rank's node, by the kernel's count, and the rank itself, by its own."""

    first_touch_wire: int
    first_touch: int
    passes_wire: int
    passes: int
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
    node = nodes[world.place(group.rank).node]
    node.enter()
    peers = open_peers(replace(world, interface=node.interface), group.rank)
    peers.meet()
    time.sleep(_SETTLE_S)
    before = _sent_over(node.interface)
    runner = build(open_replica(world, group.rank), peers, work)
    try:
        weights = runner.weights
        assert isinstance(weights, StreamedWeights)
        settle(weights)
        peers.meet()
        time.sleep(_SETTLE_S)
        loaded, loaded_bytes = _sent_over(node.interface), peers.across.bytes_sent
        for _ in range(_NUM_PASSES):
            walk(runner)
        settle(weights)
        peers.meet()
        time.sleep(_SETTLE_S)
        passed = _sent_over(node.interface)
        peers.meet()
        return Carried(
            loaded - before,
            loaded_bytes,
            passed - loaded,
            peers.across.bytes_sent - loaded_bytes,
            peers.inside.bytes_sent,
        )
    finally:
        runner.close()


def _sent_over(interface: str) -> int:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:")


@pytest.mark.parametrize(
    ("codec", "prepared", "origin"), [("int4", True, FIRST_TOUCH), ("none", False, FIRST_TOUCH), ("int8", False, FILES)]
)
def test_nodes_carry_the_first_touch_and_nothing_after_it(
    network: EmulatedNetwork, codec: str, prepared: bool, origin: str, tmp_path: Path
) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS, hidden_size=256, intermediate_size=1024)
    if prepared:
        checkpoint = open_checkpoint(str(location))
        location = tmp_path / "out"
        prepare(checkpoint, location, PrepareOptions(tp=1, dtype="float32", codec=WEIGHT_CODECS[codec]))
    world = World(1, 4, num_nodes=2, store=str(tmp_path / "store"))
    work = Work(str(location), plan_for(world, origin, codec), PROMPTS)
    with Ranks(4) as ranks:
        carried = ranks.run(_carry, world, work, network.nodes)
    reader = open_images(work, 0, 1)
    reader.close()
    for rank, own in enumerate(carried):
        assert own.first_touch == first_touch_bytes(reader, work.plan, world.place(rank))
        assert own.passes == 0
        assert own.passes_wire < _HOUSEKEEPING_BYTES < own.inside / 100
    for node in (0, 1):
        formula = sum(own.first_touch for own in carried[2 * node : 2 * node + 2])
        wire = carried[2 * node].first_touch_wire
        assert formula - 1 < wire < 1.02 * formula + _HOUSEKEEPING_BYTES
