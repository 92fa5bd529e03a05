"""Contradicting options of the sections and options that do not fit the ranks are refused, without torch."""

from typing import Any

import pytest

from tightwire.comm.group.topology import Topology
from tightwire.training.config.tree import ParallelConfig


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sharding": "zero4"}, "Input should be 'none', 'zero1'"),
        ({"num_buffers": 0}, "num_buffers"),
        ({"checkpoint_blocks": -1}, "checkpoint_blocks"),
        ({"secondary": True, "sharding": "zero2"}, "needs sharding zero3, got zero2"),
        ({"secondary": True, "sharding": "hybrid"}, "needs sharding zero3, got hybrid"),
        ({"gather_codec": "int8", "sharding": "none"}, "gather_codec=int8 has no effect with sharding none"),
        ({"prefetch": "implicit", "sharding": "none"}, "prefetch=implicit has no effect with sharding none: remove it"),
        ({"num_buffers": 3, "sharding": "none"}, "num_buffers=3 has no effect with sharding none"),
        ({"gather_path": "flat", "sharding": "hybrid"}, "gather_path=flat has no effect with sharding hybrid"),
        ({"reduce_path": "hierarchical", "sharding": "hybrid"}, "reduce_path=hierarchical has no effect with sharding"),
        ({"reshard_ends": True, "sharding": "zero2"}, "zero2 keeps all weights"),
        ({"reduce_across_codec": "int4"}, "needs reduce_path hierarchical"),
    ],
)
def test_contradicting_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig.model_validate({"sharding": "zero3", **wrong})


def test_options_for_several_nodes_are_refused_on_one() -> None:
    across = ParallelConfig(sharding="zero3", reduce_path="hierarchical", reduce_across_codec="int4")
    with pytest.raises(ValueError, match="use reduce_codec on one node"):
        across.check_ranks(Topology(0, 2))
    across.check_ranks(Topology(0, 2, num_nodes=2))
