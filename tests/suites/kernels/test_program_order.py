"""Programs of a kernel run in another order than that of their numbers, in the interpreter and as compiled."""

from pathlib import Path

import pytest
import torch
from harness import load_function
from helpers.kernels.compiled import compiled
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from helpers.kernels.libcuda import needs_launchers
from helpers.kernels.program_order import order_of

from tightwire.comm.group.group import Group

pytestmark = needs_triton
_KERNEL = """
import triton
import triton.language as tl


@triton.jit
def note(count, places):
    tl.store(places + tl.program_id(0), tl.atomic_add(count, 1))
"""


def _places(group: Group | None, path: str) -> list[int]:
    """When each of five programs runs."""
    from tightwire.kernels.cuda.launch import launch

    count, places = torch.zeros(1, dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    launch(load_function("kernel_that_notes_its_programs", path, "note"), 5, places.device, count, places)
    return places.tolist()


@pytest.mark.parametrize("way", ["interpreted", pytest.param("compiled", marks=needs_launchers)])
def test_the_order_is_not_that_of_the_numbers(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    path = tmp_path / "kernel.py"
    path.write_text(_KERNEL)
    if way == "interpreted":
        rank = InterpretedRank()
        places = rank(_places, str(path))
        rank.close()
    else:
        with compiled(90, runs=True):
            places = _places(None, str(path))
    assert sorted(places) == [*range(5)] != places
    if way == "interpreted":
        assert places == [order_of(5).index(number) for number in range(5)]


@pytest.mark.parametrize("num_programs", range(2, 40))
def test_an_order_has_all_programs_and_differs(num_programs: int) -> None:
    assert order_of(num_programs) != [*range(num_programs)] == sorted(order_of(num_programs))
