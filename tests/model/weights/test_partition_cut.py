"""Shared out: nothing twice, nothing missing, and the sums of what moves."""

import pytest

from tightwire.model.weights.partition_cut import LINE_BYTES, Cut


@pytest.mark.parametrize("num_bytes", [4096, 5 * 4096, 42 * 4096, 1 << 20])
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("per_node", [1, 2, 3, 8])
def test_an_image_is_shared_out_once_a_node(num_bytes: int, num_nodes: int, per_node: int) -> None:
    cut = Cut(num_bytes, num_nodes, per_node)
    num_ranks = num_nodes * per_node
    tail_bytes = num_bytes - cut.tail_start
    assert cut.unit_bytes % LINE_BYTES == 0
    assert 0 <= tail_bytes < num_ranks * LINE_BYTES
    assert num_ranks * cut.unit_bytes + tail_bytes == num_bytes
    assert per_node * cut.kept_bytes == num_bytes + (per_node - 1) * tail_bytes
    assert cut.pass_bytes * per_node == (per_node - 1) * (num_bytes - tail_bytes)
