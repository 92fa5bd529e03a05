"""Overlap, planning ahead and the dtype of sums are chosen by device and link, and refused where they are impossible."""

from typing import Any

import pytest

from tightwire.server.config.parallel import ParallelOptions
from tightwire.server.config.serve import EngineOptions
from tightwire.server.plan.setting import choose_overlap, choose_plan_ahead, choose_sum_dtype


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({"tp": 2}, False),
        ({"tp": 2, "overlap": "on"}, True),
        ({"tp": 2, "link": "100mbit"}, True),
        ({"tp": 2, "link": "100mbit", "overlap": "off"}, False),
        ({"tp": 2, "nodes": 2}, False),  # of one host, so in its memory
        ({}, False),
    ],
)
def test_sums_travel_beside_computing_where_there_is_a_wire(options: dict[str, Any], overlap: bool) -> None:
    assert choose_overlap(ParallelOptions(**options), "cpu") == overlap


@pytest.mark.parametrize(
    ("tp", "device", "why"), [(1, "cpu", "a single rank sums nothing"), (2, "cuda", "these run on CUDA")]
)
def test_impossible_overlap_is_refused(tp: int, device: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"--overlap on is not possible: .*{why}"):
        choose_overlap(ParallelOptions(tp=tp, overlap="on"), device)


@pytest.mark.parametrize(
    ("asked", "device", "ahead"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_steps_are_planned_ahead_where_a_device_computes_beside_the_host(asked: str, device: str, ahead: bool) -> None:
    assert choose_plan_ahead(EngineOptions(plan_ahead=asked), device) == ahead
    assert choose_plan_ahead(EngineOptions(plan_ahead="auto"), device, 2) is False


@pytest.mark.parametrize(
    ("options", "device", "dtype"),
    [
        ({"tp": 2}, "cpu", "float32"),
        ({"tp": 2, "transport": "process-group"}, "cpu", "float32"),
        ({}, "cpu", "float32"),
        ({"tp": 2, "link": "100mbit"}, "cpu", "bfloat16"),
        ({"tp": 2, "nodes": 2}, "cpu", "bfloat16"),
        ({"tp": 2}, "cuda", "bfloat16"),
        ({"tp": 2, "sum_dtype": "float32"}, "cuda", "float32"),
        ({"tp": 2, "sum_dtype": "float16"}, "cpu", "float16"),
    ],
)
def test_sums_are_float32_where_memory_carries_them(options: dict[str, Any], device: str, dtype: str) -> None:
    assert choose_sum_dtype(ParallelOptions(**options), device, "bfloat16") == dtype
