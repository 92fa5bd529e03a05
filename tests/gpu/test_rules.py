"""What CUDA refuses, which an emulated device must refuse too, or the tests on it show nothing."""

import os
import subprocess
import sys

import pytest
import torch

from tightwire.kernels.transfer import upload

pytestmark = pytest.mark.gpu
_CHILD = "TIGHTWIRE_FAILED_CAPTURE"


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
    """On a real device in a process of its own: torch does not end a capture that failed, so later ones there fail too."""
    if _CHILD not in os.environ and "Emulated" not in torch.cuda.get_device_name(device):
        case = f"{__file__}::{test_a_capture_refuses_what_waits.__name__}[{what}]"
        command = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", case
        run = subprocess.run(
            command, check=False, env=os.environ | {_CHILD: "1"}, capture_output=True, text=True, timeout=120
        )
        assert "1 passed" in run.stdout, run.stdout + run.stderr
        return
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
