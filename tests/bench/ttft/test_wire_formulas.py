from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tightwire.bench.ttft.proof import Message, WireFormulas
from tightwire.bench.ttft.summary import describe_bound
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.nodes import in_process_node_groups


def formulas(world_size: int, nodes: int, wire_nodes: int | None = None) -> WireFormulas:
    return WireFormulas(
        world_size=world_size, num_nodes=nodes, wire_nodes=nodes if wire_nodes is None else wire_nodes, elem_bytes=2
    )


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical:int8"])
def test_what_crosses_between_nodes_is_what_the_groups_across_count(name: str) -> None:
    groups = in_process_node_groups(4, 2)
    x = torch.ones(4 * 512, dtype=torch.bfloat16)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda group: make_all_reduce(name, group)(x), groups))
    sent = [group.nodes.across.transport.bytes_sent for group in groups[:2] if group.nodes is not None]
    assert formulas(4, 2).crossing(name, x.nbytes) == sum(sent) > 0


def test_flat_algorithms_send_two_thirds_to_the_other_of_two_nodes() -> None:
    wire = formulas(4, 2)
    assert wire.sent("two-shot", 0, 12_288) == 18_432
    assert wire.crossing("two-shot", 12_288) == 2 * 18_432 * 2 / 3
    assert wire.crossing("ring", 12_288) == 18_432
    assert formulas(2, 1, wire_nodes=2).crossing("two-shot", 12_288) == 12_288


def test_bound_is_computing_coding_and_bytes_over_bandwidth() -> None:
    messages = [Message("two-shot", "prefill", 4096), Message("two-shot", "decode", 64)]
    use = formulas(2, 1, wire_nodes=2).prompt_use(messages, gathered_bytes=904)
    assert (use.wire_bytes, use.rounds) == (5000, 3)
    link = {"measured_bytes_per_s": 50_000.0, "asked_bytes_per_s": 60_000.0, "latency_s": 0.01}
    bound = describe_bound(use, link, 0.2, 0.66, overlap=False)
    assert bound["wire_s"] == pytest.approx(0.13)
    assert bound["bound_s"] == pytest.approx(0.33)
    assert bound["ttft_over_bound"] == pytest.approx(2.0)
    # At the same time, the slower of the two.
    assert describe_bound(use, link, 0.25, 1, overlap=True)["bound_s"] == 0.25
    assert describe_bound(use, link, 0.1, 1, overlap=True)["bound_s"] == pytest.approx(0.13)
