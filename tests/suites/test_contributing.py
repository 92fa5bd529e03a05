"""The examples of CONTRIBUTING.md work as they are written: a test with the harness, and a new AllReduce."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.all_reduce import entry, names
from tightwire.comm.all_reduce.registry import ALL_REDUCE, make_all_reduce, parse_all_reduce
from tightwire.comm.group.group import Group

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
TEST, ROW, FILE = re.findall(r"<!-- run by tests/suites/test_contributing.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)


def _run(text: str, name: str) -> dict[str, Any]:
    """The names of a module with this text."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, f"CONTRIBUTING.md: {name}", "exec"), module.__dict__)
    return module.__dict__


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's name, with its row and its file in place."""
    row = eval(ROW, {"Entry": entry.Entry})
    monkeypatch.setitem(names.NAMES, row.name, row)
    monkeypatch.setitem(ALL_REDUCE, row.name, _run(FILE, row.module)["ENTRY"])
    yield row.name
    del sys.modules[row.module]


def test_the_example_of_a_test_passes() -> None:
    test = _run(TEST, "example_test")["test_every_rank_holds_the_sum"]
    try:
        for world_size in (1, 2, 3):
            test(world_size)
    finally:
        del sys.modules["example_test"]


def _inputs(world_size: int) -> list[Tensor]:
    return list(torch.randn(world_size, 1000, generator=torch.Generator().manual_seed(0)).bfloat16())


def _relay_and_one_shot(group: Group) -> tuple[Tensor, Tensor, int, int]:
    x = _inputs(group.world_size)[group.rank]
    relay, one_shot = (make_all_reduce(name, group) for name in ("relay", "one-shot"))
    before = group.bytes_sent
    result = relay(x)
    return result, one_shot(x), group.bytes_sent - before - one_shot.wire_bytes(1000, 2), relay.wire_bytes(1000, 2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_example_of_an_all_reduce_keeps_its_promises(relay: str, world_size: int) -> None:
    assert relay in names.describe_all_reduce_names() and parse_all_reduce(relay).lossless
    for result, one_shot, sent, promised in run_in_process(world_size, _relay_and_one_shot):
        assert torch.equal(result, one_shot)
        assert sent == promised == (world_size - 1) * 2000
