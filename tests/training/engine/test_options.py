"""Contradicting engine options are refused."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tightwire.training.config.sharding import SHARDINGS, parse_sharding
from tightwire.training.config.tree import ParallelConfig
from tightwire.training.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gather_codec": "int9"}, "unknown codec 'int9'"),
        ({"compute_dtype": torch.float16}, "compute_dtype must be float32 or bfloat16, got torch.float16"),
        ({"num_buffers": 0}, "num_buffers must be at least 1, got 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must be 0"),
        ({"secondary": True, "sharding": SHARDINGS["zero2"]}, "needs sharding zero3, got zero2"),
        ({"secondary": True, "sharding": SHARDINGS["hybrid"]}, "needs sharding zero3, got hybrid"),
        ({"gather_codec": "int8", "sharding": SHARDINGS["none"]}, "every rank has all weights"),
        (
            {"reduce_path": "hierarchical", "sharding": SHARDINGS["hybrid"]},
            "sharded over all ranks, got sharding hybrid",
        ),
        ({"secondary_codec": "int8"}, "need secondary: true"),
        ({"reduce_across_codec": "int4"}, "needs reduce_path hierarchical"),
    ],
)
def test_contradicting_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(EngineOptions(), **wrong)


def test_options_for_several_nodes_are_refused_on_one() -> None:
    across = EngineOptions(reduce_path="hierarchical", reduce_across_codec="int4")
    with pytest.raises(ValueError, match="use reduce_codec on one node"):
        across.check_ranks(1)
    across.check_ranks(2)


def test_defaults_are_those_of_the_configuration() -> None:
    engine, parallel = EngineOptions(), ParallelConfig()
    named = [field.name for field in fields(engine) if field.name not in ("sharding", "compute_dtype", "reduce_dtype")]
    assert {name: getattr(parallel, name) for name in named} == {name: getattr(engine, name) for name in named}


def test_an_unknown_sharding_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown sharding 'zero4'; choose one of none, zero1, zero2, zero3, hybrid"):
        parse_sharding("zero4")
