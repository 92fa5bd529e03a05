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


@pytest.mark.parametrize("what", ["number", "nonzero", "copy to the host", "pageable copy", "event", "stream"])
def test_a_capture_refuses_what_waits(what: str, device: torch.device) -> None:
    x, event = torch.ones(3, device=device), torch.cuda.Event()
    torch.cuda.synchronize()

    def wait() -> None:
        x.add_(1)
        event.record()
        match what:
            case "number":
                x[0].item()
            case "nonzero":
                x.nonzero()
            case "copy to the host":
                x.cpu()
            case "pageable copy":
                x.copy_(torch.zeros(3))
            case "event":
                event.synchronize()
            case _:
                torch.cuda.current_stream().synchronize()

    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        wait()
    assert (x + 1).tolist()[0] >= 2, "the device is lost"


def test_replays_compute_with_the_numbers_of_their_time(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2 + 1).sum()
    x.fill_(5)
    graph.replay()
    assert total.item() == 33
