"""Devices for the tests of this folder, which skip with the reason where there are none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _devices(request: pytest.FixtureRequest) -> None:
    wanted = 2 if request.node.get_closest_marker("multi_gpu") else 1
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA device{'s' * (wanted > 1)}, and torch finds {found}")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
