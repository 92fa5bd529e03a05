"""What CUDA refuses, which an emulated device must refuse too, or the tests on it show nothing."""

import pytest
import torch

from tightwire.kernels.transfer import upload

pytestmark = pytest.mark.gpu


def test_devices_do_not_mix(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device).add(torch.ones(3))


def test_what_waits_for_the_device_is_found(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        upload([1, 2, 3], torch.int32, device)
        x.add_(1)
        for wait in (lambda: x[0].item(), lambda: x.cpu(), x.nonzero):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_replays_compute_with_the_numbers_of_their_time(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2 + 1).sum()
    x.fill_(5)
    graph.replay()
    assert total.item() == 33
