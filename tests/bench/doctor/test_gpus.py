"""What nvidia-smi prints, as it prints it, and the probe of torch."""

import os
from pathlib import Path

import pytest
import torch
from torch.cuda import nccl

from tightwire.bench.doctor.gpus import (
    Driver,
    PeerTest,
    Torch,
    examine_torch,
    parse_gpus,
    parse_nvlinks,
    read_driver,
    read_torch,
)
from tightwire.comm.transport import peer_access
from tightwire.comm.transport.peer_access import PeerCheck
from tightwire.cuda_devices import torch_has_cuda

QUERY = """0, NVIDIA GeForce RTX 3090, 00000000:0A:00.0, 24576, 580.65.06, 1, 4, 8, 16, P8
1, NVIDIA H200, 00000000:C1:00.0, 143771, 580.65.06, [N/A], [N/A], [N/A], [N/A], P0
"""
NVLINK = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-3e2d)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
\t Link 2: <inactive>
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-7f11)
\t Link 0: 26.562 GB/s
GPU 2: Tesla T4 (UUID: GPU-1111)
"""


def test_gpus() -> None:
    first, second = parse_gpus(QUERY)
    assert (first.index, first.name, first.address) == (0, "NVIDIA GeForce RTX 3090", "0000:0a:00.0")
    assert (first.memory_bytes, first.driver) == (24 << 30, "580.65.06")
    assert (first.generation, first.max_generation, first.width, first.max_width) == (1, 4, 8, 16)
    assert (second.generation, second.max_width, second.power_state) == (None, None, "P0")


def test_no_gpu_is_not_a_problem() -> None:
    assert parse_gpus("\n") == []


def test_nvlinks_of_the_gpus_that_have_some() -> None:
    assert parse_nvlinks(NVLINK) == (True, ["GPU 0: 1 of 3 NVLinks are inactive"])
    assert parse_nvlinks("") == (False, [])


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of the test's own, before all others."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def _say(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(tool, 0o755)


def test_without_nvidia_smi_the_reason_is_reported(tools: Path) -> None:
    assert read_driver(60.0) == (Driver(absent_reason="nvidia-smi is not installed"), None) and not tools.exists()


def test_gpus_and_links_together(tools: Path) -> None:
    for name, text in (("query", QUERY), ("nvlink", NVLINK)):
        (tools.parent / name).write_text(text)
    case = f"""case $1 in --query*) file=query;; *) file=$1;; esac
while IFS= read -r line; do printf '%s\\n' "$line"; done < {tools.parent}/$file"""
    _say(tools, case)
    driver, problem = read_driver(60.0)
    assert (len(driver.gpus), driver.has_nvlink, problem) == (2, True, None)


def test_a_failing_driver_is_reported_with_its_error(tools: Path) -> None:
    _say(tools, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert read_driver(60.0) == (
        Driver(),
        "exited with code 18 Failed to initialize NVML: Driver/library version mismatch",
    )


def test_each_pair_is_reported_before_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PeerCheck(False, "copy engine: 3 of 9 values arrived wrong", None)
    outcomes = {("cuda:0", "cuda:1"): PeerCheck(True, "whole", 20.0), ("cuda:1", "cuda:0"): lost}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(nccl, "version", lambda: (2, 29))
    monkeypatch.setattr(peer_access, "claimed_peers", lambda: [(0, 1), (1, 0)])
    monkeypatch.setattr(peer_access, "check_peer_writes", lambda writer, owner: outcomes[str(writer), str(owner)])

    *told, last = examine_torch()

    assert [(facts.under_way, len(facts.tests)) for facts in told] == [((0, 1), 0), ((1, 0), 1)]
    assert (last.under_way, last.tests) == (None, [PeerTest(0, 1, True, "whole", 20.0), PeerTest(1, 0, *lost)])


@pytest.mark.skipif(torch_has_cuda(), reason="this torch is built for CUDA")
def test_a_cpu_build_of_torch_needs_no_process() -> None:
    assert read_torch(0.0) == (Torch(), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_devices_of_this_machine() -> None:
    facts, problem = read_torch(120.0)
    assert problem is None and len(facts.devices) == torch.cuda.device_count() and facts.nccl is not None
