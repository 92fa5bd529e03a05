"""Facts of the host, read from a tree of files like the kernel's."""

from pathlib import Path

import pytest

from tightwire.bench.doctor import host
from tightwire.bench.doctor.facts import Interface, NumaNode

X86 = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512bw avx512_bf16 amx_tile amx_bf16 hypervisor

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512bw avx512_bf16 amx_tile amx_bf16 hypervisor
"""
ARM = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd aes asimdhp asimddp sve i8mm bf16
"""


def write(root: Path, **files: str) -> Path:
    """Files of a tree; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_cpu_on_x86(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    facts = host.cpu(write(tmp_path, proc__cpuinfo=X86))
    assert facts.model == "Intel(R) Xeon(R) Platinum 8480+" and facts.virtual is True
    assert facts.vector_flags == ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16"]
    assert 1 <= facts.num_usable <= facts.num_allowed <= facts.num_cpus
    assert facts.numa_nodes == []


def test_cpu_on_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    facts = host.cpu(write(tmp_path, proc__cpuinfo=ARM))
    assert facts.architecture == "aarch64" and facts.virtual is None and facts.model
    assert facts.vector_flags == ["asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"]


def test_numa_nodes_are_sorted_by_number(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/devices/system/node"
    for number, cpus in ((10, "20-21"), (2, "4-5,36-37")):
        text = f"Node {number} MemTotal:       {number * 1024} kB\nNode {number} MemFree:        1 kB"
        write(nodes / f"node{number}", cpulist=cpus, meminfo=text)
    write(nodes, possible="0-10")
    assert host.numa_nodes(tmp_path) == [NumaNode(2, "4-5,36-37", 2 << 20), NumaNode(10, "20-21", 10 << 20)]


def test_memory(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo="MemTotal:  2048 kB\nMemFree: 9 kB\nMemAvailable:  1024 kB")
    facts = host.memory(tmp_path)
    assert (facts.total_bytes, facts.available_bytes) == (2 << 20, 1 << 20)
    assert facts.shm_bytes is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert (host.memory(tmp_path).shm_bytes or 0) > 0


def test_network(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net"
    write(net / "lo", operstate="unknown", type="772", mtu="65536", speed="")
    write(net / "eth0", operstate="up", type="1", mtu="9000", speed="25000")
    write(net / "veth1", operstate="up", type="1", mtu="1500", speed="-1")
    write(net / "eth1", operstate="down", type="1", mtu="1500")
    write(net, bonding_masters="bond0")
    facts = host.network(tmp_path)
    assert facts.interfaces == [
        Interface("eth0", "up", 25000, 9000),
        Interface("eth1", "down", None, 1500),
        Interface("veth1", "up", None, 1500),
    ]


def test_versions_of_installed_packages() -> None:
    facts = host.versions()
    assert {"tightwire", "torch", "numpy"} <= facts.packages.keys() and facts.kernel
