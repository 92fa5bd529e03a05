"""The examples of CONTRIBUTING.md work as they are written: a test with the harness, and a new AllReduce."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.all_reduce import names
from tightwire.comm.all_reduce.make import ALL_REDUCE, make_all_reduce, parse_all_reduce
from tightwire.comm.group.group import Group

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
TEST, ROW, FILE = re.findall(r"<!-- run by tests/suites/test_contributing.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)


def _imported(text: str, name: str, folder: Path) -> ModuleType:
    """A module with this text."""
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The example's name, with its row and its file in place."""
    row = _imported(f"from tightwire.comm.all_reduce.entry import Entry\n\nROW = {ROW}", "row", tmp_path).ROW
    monkeypatch.setitem(names.NAMES, row.name, row)
    monkeypatch.setitem(ALL_REDUCE, row.name, _imported(FILE, "relay", tmp_path).ENTRY)
    return row.name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_example_of_a_test_passes(world_size: int, tmp_path: Path) -> None:
    _imported(TEST, "example_test", tmp_path).test_every_rank_holds_the_sum(world_size)


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
