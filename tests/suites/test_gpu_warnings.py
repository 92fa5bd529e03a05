"""Warnings are no errors in tests that need a GPU, wherever they stand: drivers and libraries there give their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("marker", ["gpu", "multi_gpu", "slow"])
def test_warnings_of_a_marked_test(marker: str, request: pytest.FixtureRequest) -> None:
    path = str(Path(__file__).parents[1] / "conftest.py")
    plugins: list[Any] = [*request.config.pluginmanager.get_plugins()]
    (conftest,) = [plugin for plugin in plugins if getattr(plugin, "__file__", None) == path]
    added: list[Any] = []
    item = SimpleNamespace(get_closest_marker=lambda name: name == marker, add_marker=added.append)
    conftest.pytest_collection_modifyitems([item])
    assert [mark.args for mark in added] == ([] if marker == "slow" else [("default",)])
