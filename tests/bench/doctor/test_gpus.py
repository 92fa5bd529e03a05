"""What nvidia-smi prints, as it prints it."""

import os
from pathlib import Path

import pytest

from tightwire.bench.doctor.facts import NvLinks
from tightwire.bench.doctor.gpus import gpus, parse_gpus, parse_nvlinks

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
    assert (first.index, first.name, first.link.address) == (0, "NVIDIA GeForce RTX 3090", "0000:0a:00.0")
    assert (first.memory_bytes, first.driver) == (24 << 30, "580.65.06")
    link = first.link
    assert (link.gt_per_s, link.max_gt_per_s, link.width, link.max_width) == (2.5, 16.0, 8, 16)
    assert (second.link.gt_per_s, second.link.max_width, second.power_state) == (None, None, "P0")


def test_no_gpu_is_not_a_problem() -> None:
    assert parse_gpus("\n") == []


def test_nvlinks_of_the_gpus_that_have_some() -> None:
    assert parse_nvlinks(NVLINK) == [NvLinks(0, 2, 1, 50.0), NvLinks(1, 1, 0, 26.562)]
    assert parse_nvlinks("") == []


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of the test's own, before all others."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "nvidia-smi"


def _say(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(tool, 0o755)


def test_without_nvidia_smi_the_reason_is_reported(tools: Path) -> None:
    assert gpus().absent_reason == "nvidia-smi is not installed" and not tools.exists()


def test_gpus_and_links_together(tools: Path) -> None:
    for name, text in (("query", QUERY), ("nvlink", NVLINK)):
        (tools.parent / name).write_text(text)
    case = f"""case $1 in --query*) file=query;; *) file=$1;; esac
while IFS= read -r line; do printf '%s\\n' "$line"; done < {tools.parent}/$file"""
    _say(tools, case)
    facts = gpus()
    assert (len(facts.gpus), len(facts.nvlinks)) == (2, 2)


def test_a_failing_driver_is_reported_with_its_error(tools: Path) -> None:
    _say(tools, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    with pytest.raises(RuntimeError, match="Failed to initialize NVML: Driver/library version mismatch"):
        gpus()
