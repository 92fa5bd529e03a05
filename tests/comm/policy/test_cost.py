"""Predicted times: bytes agree with the algorithms' formulas, measurements replace seeds, quantizing pays below a crossover rate."""

import pytest
from msgspec.structs import replace

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import all_reduce_names
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.group.nodes import in_process_node_groups
from tightwire.comm.link.link import Link
from tightwire.comm.policy.cost import LINK_COSTS, CostModel, size_grid
from tightwire.comm.transport.wire_codec import CODING_US_A_MIB, USUAL_SHARE


def setting(world_size: int = 2, transport: str = "shared-memory", num_nodes: int = 1, device: str = "cpu") -> Setting:
    return Setting(transport=transport, device=device, world_size=world_size, num_nodes=num_nodes, dtype="bfloat16")


_MIB = 1 << 20
NAMES = [*(name for name in all_reduce_names() if name != "auto"), "flash:int4-g32,int8", "hierarchical:int8"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("world_size", "num_nodes"), [(2, 1), (3, 1), (4, 2), (8, 2)])
def test_bytes_are_the_algorithms_own(name: str, world_size: int, num_nodes: int) -> None:
    group = in_process_node_groups(world_size, num_nodes)[0] if num_nodes > 1 else in_process_groups(world_size)[0]
    costs = CostModel(setting(world_size, num_nodes=num_nodes))
    for num_elems in (576, 576 * 512):
        exact = make_all_reduce(name, group).wire_bytes(num_elems, 2)
        if name.startswith(("one-shot", "two-shot", "flash")):
            assert costs.wire_bytes(name, 2 * num_elems) == exact
        else:
            # A slice is rounded up to whole groups of 128, which one rank sends or keeps in each of two legs.
            assert abs(costs.wire_bytes(name, 2 * num_elems) - exact) <= 2 * world_size * 128 * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("link", sorted(LINK_COSTS))
def test_a_larger_message_never_costs_less(name: str, link: tuple[str, str]) -> None:
    costs = CostModel(setting(4, link[0], 2, link[1]))
    times = [costs.predict(name, size).us for size in size_grid(1024, 1 << 26)]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize(("name", "rounds"), [("one-shot", 1), ("two-shot", 2), ("flash:none,none", 2)])
def test_a_message_of_next_to_nothing_costs_a_call_and_its_rounds(name: str, rounds: int) -> None:
    costs, link = CostModel(setting(4)), LINK_COSTS["shared-memory", "cpu"]
    assert costs.modelled_us(name, 2) == pytest.approx(link.call + rounds * link.round, rel=1e-3)


def test_those_that_always_go_message_by_message_wait_longer_in_each_of_their_rounds() -> None:
    link, between = LINK_COSTS["shared-memory", "cpu"], LINK_COSTS["sockets", "cpu"]
    costs = CostModel(setting(4, num_nodes=2))
    ring_us, nodes_us = link.call + 6 * link.message_round, link.call + 2 * (link.message_round + between.message_round)
    assert costs.modelled_us("ring", 2) == pytest.approx(ring_us, rel=1e-3)
    assert costs.modelled_us("hierarchical", 2) == pytest.approx(nodes_us, rel=1e-3)


@pytest.mark.parametrize(
    ("coded", "plain", "encoded", "decoded"),
    [
        # A rank encodes its numbers and its slice of the sum, decodes all ranks' parts of its slice and all the sums.
        ("flash:int8,int8", "flash:none,none", 1 + 1 / 4, 2),
        ("flash:none,int8", "flash:none,none", 1 / 4, 1),
        ("flash:int8,none", "flash:none,none", 1, 1),
        # The same with its node's sum of half the tensor, between two nodes.
        ("hierarchical:int8", "hierarchical", (1 + 1 / 2) / 2, 2 / 2),
    ],
)
def test_what_is_quantized_costs_its_encoding_and_decoding(
    coded: str, plain: str, encoded: float, decoded: float
) -> None:
    costs, link = CostModel(setting(4, num_nodes=2)), LINK_COSTS["shared-memory", "cpu"]
    num_elems = 1 << 20
    saved_mib = (costs.wire_bytes(plain, 2 * num_elems) - costs.wire_bytes(coded, 2 * num_elems)) / (1 << 20)
    wire = LINK_COSTS["sockets", "cpu"] if plain == "hierarchical" else link
    more_us = costs.modelled_us(coded, 2 * num_elems) - costs.modelled_us(plain, 2 * num_elems)
    coding_us = link.coded_call + encoded * link.encode_melem + decoded * link.decode_melem
    if plain == "hierarchical":
        coding_us -= wire.sum_melem / 2  # a node's half, added exactly
    assert more_us + saved_mib * wire.mib == pytest.approx(coding_us)


def test_one_shot_wins_small_messages_and_two_shot_large_ones() -> None:
    costs = CostModel(setting(4))
    assert costs.predict("one-shot", 1024).us < costs.predict("two-shot", 1024).us
    assert costs.predict("one-shot", 1 << 24).us > costs.predict("two-shot", 1 << 24).us


def test_with_two_ranks_one_shot_sends_no_more_and_always_wins() -> None:
    costs = CostModel(setting(2))
    assert all(costs.predict("one-shot", n).us < costs.predict("two-shot", n).us for n in size_grid(64, 1 << 28))


def test_measurements_are_read_off_joined_and_continued() -> None:
    costs = CostModel(setting(), {"one-shot": [(1000, 10.0), (100_000, 1000.0)]})
    assert costs.predict("one-shot", 1000).us == 10
    assert costs.predict("one-shot", 100_000).us == 1000
    assert costs.predict("one-shot", 10_000).us == pytest.approx(100)  # a straight line in logarithms
    beyond = costs.predict("one-shot", 1 << 20)
    ratio = costs.modelled_us("one-shot", 1 << 20) / costs.modelled_us("one-shot", 100_000)
    assert beyond.measured and beyond.us == pytest.approx(1000 * ratio)
    assert costs.predict("one-shot", 100).us < 10
    assert not costs.predict("two-shot", 1000).measured


def test_a_single_measured_size_scales_the_seeds() -> None:
    costs = CostModel(setting(), {"ring": [(1000, 3 * CostModel(setting()).modelled_us("ring", 1000))]})
    for size in (10, 1000, 100_000):
        assert costs.predict("ring", size).us == pytest.approx(3 * costs.modelled_us("ring", size))


def test_a_transport_without_seeds_is_refused() -> None:
    with pytest.raises(ValueError, match="no cost is known of cuda ranks over shared-memory"):
        CostModel(setting(device="cuda"))


def test_the_grid_covers_both_ends() -> None:
    grid = size_grid(1152, 1152 * 512)
    assert grid[0] == 1152 and grid[-1] >= 1152 * 512
    assert size_grid(64, 64) == [64]


def test_behind_a_link_bytes_go_at_its_rate_and_rounds_wait_its_latency() -> None:
    wire = Link("200mbit,latency=1ms", 25e6, 1e-3)
    free, slow = CostModel(setting(2, "process-group")), CostModel(setting(2, "process-group"), None, wire)
    loop, size = LINK_COSTS["process-group", "cpu"], 1 << 20
    for name, rounds in (("one-shot", 1), ("two-shot", 2), ("ring", 2), ("native", 2), ("flash-int8", 2)):
        sent = slow.wire_bytes(name, size)
        added_us = sent / 25e6 * 1e6 - sent / size * loop.mib + rounds * 1000
        assert slow.modelled_us(name, size) - free.modelled_us(name, size) == pytest.approx(added_us, rel=1e-6)


def test_a_link_faster_than_the_transport_changes_nothing_there() -> None:
    fast = CostModel(setting(2, "process-group"), None, Link("100gbit", 12.5e9))
    for name in NAMES:
        assert fast.modelled_us(name, 1 << 20) == pytest.approx(
            CostModel(setting(2, "process-group")).modelled_us(name, 1 << 20)
        )


def test_ranks_of_a_node_share_its_wire_and_hierarchical_carries_less_over_it() -> None:
    """Two nodes of two: a flat all-to-all takes 2/3 of both ranks' bytes across, a ring one rank's, hierarchical half."""
    wire, size = Link("80mbit", 10e6), 1 << 22
    costs = CostModel(setting(4, "process-group", 2), None, wire)
    across = {"two-shot": 2 * 2 / 3 * 1.5 * size, "ring": 1.5 * size, "hierarchical": 2 * 1 * size / 2}
    for name, num_bytes in across.items():
        us = costs.modelled_us(name, size)
        assert num_bytes / 10e6 <= us * 1e-6 <= num_bytes / 10e6 + 0.01


def test_behind_a_link_computing_that_was_measured_takes_the_place_of_the_seeds() -> None:
    wire, sizes = Link("200mbit,latency=1ms", 25e6, 1e-3), (1 << 10, 1 << 20)
    computing = {"flash-int8": [(sizes[0], 300.0), (sizes[1], 9000.0)]}
    costs = CostModel(setting(2, "process-group"), None, wire, computing)
    loop = LINK_COSTS["process-group", "cpu"]
    for size, us in zip(sizes, (300, 9000), strict=True):
        moving_us = 2 * (loop.message_round + 1000) + costs.wire_bytes("flash-int8", size) / 25
        assert costs.predict("flash-int8", size).us == pytest.approx(us + moving_us, rel=1e-6)
        assert not costs.predict("flash-int8", size).measured, "the whole was not"
    # Beyond, as the seeds grow; and nothing changes for what was not measured, or without a wire.
    seeds = CostModel(setting(2, "process-group"), None, wire)
    added = [
        m.modelled_us("flash-int8", 1 << 22) - costs.wire_bytes("flash-int8", 1 << 22) / 25 for m in (costs, seeds)
    ]
    assert added[0] > 2 * added[1]
    assert costs.modelled_us("two-shot", 1 << 20) == seeds.modelled_us("two-shot", 1 << 20)
    free = CostModel(setting(2, "process-group"), None, None, computing)
    assert free.modelled_us("flash-int8", 1024) == CostModel(setting(2, "process-group")).modelled_us(
        "flash-int8", 1024
    )


def test_a_codec_that_packs_planes_or_small_groups_takes_longer() -> None:
    costs = CostModel(setting(2), None)
    plain, planes, small = (
        costs.modelled_us(f"flash:{codec},{codec}", 1 << 24)
        - costs.wire_bytes(f"flash:{codec},{codec}", 1 << 24) / _MIB * 200
        for codec in ("int8", "int6", "int8-g32")
    )
    assert plain < small < planes


@pytest.mark.parametrize(
    ("name", "num_bytes", "crossing"),
    [
        ("two-shot", 256 << 10, 2 * 3 / 4),  # in messages of a quarter, the least that are coded
        ("ring", 256 << 10, 2 * 3 / 4),
        ("hierarchical", 256 << 10, 2 * 1 / 2 / 2),
        ("one-shot", 64 << 10, 3),  # in whole ones
    ],
)
def test_coded_sums_move_as_on_a_faster_wire_and_take_the_time_to_code(
    name: str, num_bytes: int, crossing: float
) -> None:
    plain = setting(4, "sockets", 2)
    coded = CostModel(replace(plain, coded=True), wire=Link("200mbit", 25e6))
    faster = CostModel(plain, wire=Link("", 25e6 / USUAL_SHARE))
    computing_us, moving_us = coded.parts_us(name, num_bytes)
    plain_us, faster_us = faster.parts_us(name, num_bytes)
    assert moving_us == pytest.approx(faster_us)
    assert computing_us == pytest.approx(plain_us + 2 * num_bytes / _MIB * crossing * CODING_US_A_MIB)


@pytest.mark.parametrize(("name", "num_bytes"), [("two-shot", 100 << 10), ("flash-int8", 4 << 20), ("native", 4 << 20)])
def test_short_messages_encoded_ones_and_a_library_s_are_not_coded(name: str, num_bytes: int) -> None:
    plain, wire = setting(2, "sockets", 2), Link("200mbit", 25e6)
    coded = CostModel(replace(plain, coded=True), wire=wire)
    assert coded.parts_us(name, num_bytes) == CostModel(plain, wire=wire).parts_us(name, num_bytes)
