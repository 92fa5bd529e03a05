"""Algorithms by name, names that are none, and inputs no algorithm takes."""

import pytest
import torch

from tightwire.comm.all_reduce.make import (
    make_all_reduce,
    parse_all_reduce,
)
from tightwire.comm.all_reduce.names import NAMES, all_reduce_names, describe_all_reduce_names
from tightwire.comm.group.group import in_process_groups

PRESETS = NAMES["flash"].presets
PATTERNED = ["flash:int4,int8", "flash:int4-g64-had,int6", "flash:none,fp8", "hierarchical:int8", "hierarchical:none"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown all-reduce 'rign'; choose one of auto, native, one-shot") as caught:
        parse_all_reduce("rign")
    assert all(name in str(caught.value) for name in [*all_reduce_names(), "flash:RS,AG", "hierarchical:CODEC"])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("flash", "unknown all-reduce 'flash'"),
        ("flash:int8", "'flash:int8' needs two codecs"),
        ("flash:int8,int8,int8", "needs two codecs"),
        ("flash:int8,int9", "'flash:int8,int9': unknown codec 'int9'"),
        ("flash: int8,int8", "unknown codec ' int8'"),
        ("hierarchical:", "'hierarchical:': unknown codec ''"),
        ("hierarchical:int8,int8", "unknown codec 'int8,int8'"),
        ("", "unknown all-reduce ''"),
    ],
)
def test_says_what_is_wrong_with_a_name(name: str, complaint: str) -> None:
    [group] = in_process_groups(1)
    with pytest.raises(ValueError, match=complaint):
        parse_all_reduce(name)
    with pytest.raises(ValueError, match=complaint):
        make_all_reduce(name, group)


@pytest.mark.parametrize("name", [*all_reduce_names(), *PATTERNED])
def test_objects_carry_their_name(name: str) -> None:
    [group] = in_process_groups(1)
    assert parse_all_reduce(name).name == make_all_reduce(name, group).name == name


def test_the_quantized_names_are_known_as_such() -> None:
    quantized = {name for name in all_reduce_names() if not parse_all_reduce(name).lossless}
    assert quantized == set(PRESETS)
    assert not parse_all_reduce("hierarchical:int8").lossless
    assert parse_all_reduce("hierarchical:none").lossless


def test_presets_name_the_codec_of_each_leg() -> None:
    legs = {name: tuple(codec.name for codec in parse_all_reduce(name).codecs) for name in PRESETS}
    assert legs["flash-int6-plain"] == ("int4", "int8")  # as published: fewer bits where sums are not yet made
    assert legs["flash-int6"] == ("int6-g64-sym-had-ef", "int6-g64-sym-had-ef")


def test_the_description_names_every_pattern() -> None:
    assert "flash:RS,AG" in describe_all_reduce_names() and "hierarchical:CODEC" in describe_all_reduce_names()


@pytest.mark.parametrize("name", ["one-shot", "flash-int8", "hierarchical"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_refuses_what_it_cannot_sum(dtype: torch.dtype, name: str) -> None:
    [group] = in_process_groups(1)
    with pytest.raises(TypeError, match=f"got {dtype}"):
        make_all_reduce(name, group)(torch.zeros(3, dtype=dtype))
