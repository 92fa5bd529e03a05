"""Kernels that are launched while the kernel before ends: on which GPUs, and that all of them wait for it first."""

import ast
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernels.interpreted import needs_triton

import tightwire.kernels.cuda

pytestmark = needs_triton
_FOLDER = Path(tightwire.kernels.cuda.__path__[0])


class _Kernel:
    """Keeps the options of its last launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> "_Kernel":
        return self

    def __call__(self, *args: object, **options: Any) -> None:
        self.options = options


@pytest.mark.parametrize(
    ("capability", "overlaps"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_where_launches_overlap(capability: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightwire.kernels.cuda import launch as launch_file

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    launch_file._overlaps.cache_clear()
    kernel = _Kernel()
    try:
        launch_file.launch(kernel, 1, torch.device("cuda:0"))
        assert kernel.options["launch_pdl"] == overlaps
        launch_file.launch(kernel, 1, torch.device("cpu"))
        assert not kernel.options["launch_pdl"]
    finally:
        launch_file._overlaps.cache_clear()


def test_all_kernels_wait_first() -> None:
    """Before anything else, as a branch or an access before it would not."""
    launched, functions = set[str](), dict[str, ast.FunctionDef]()
    for path in _FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                functions[node.name] = node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                launched.add(ast.unparse(node.args[0]))
    assert {"_norm_product", "_attend_chunks", "two_shot_kernel"} < launched
    for name in launched:
        body = functions[name].body
        first = body[ast.get_docstring(functions[name]) is not None]
        assert ast.unparse(first).startswith("wait_for_last("), name
