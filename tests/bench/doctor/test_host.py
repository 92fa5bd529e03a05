"""Facts of the host, read from a tree of files like the kernel's, and from what lspci says."""

from pathlib import Path

from tightwire.bench.doctor.host import read_host, redirecting_ports

LSPCI = """00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] GPP Bridge (prog-if 00 [Normal decode])
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
00:03.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] GPP Bridge (prog-if 00 [Normal decode])
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
01:00.0 VGA compatible controller: NVIDIA Corporation GA102 [GeForce RTX 3090] (rev a1)
\tCapabilities: [60] Power Management version 3
"""
DENIED = """00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge
\tCapabilities: <access denied>
"""
MEMINFO = "MemTotal:  2048 kB\nMemFree: 9 kB\nMemAvailable:  1024 kB"


def write(root: Path, **files: str) -> Path:
    """Files of a tree; ``__`` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_an_empty_tree(tmp_path: Path) -> None:
    host = read_host(60.0, write(tmp_path, proc__meminfo=MEMINFO))
    assert (host.total_bytes, host.available_bytes, host.shm_bytes) == (2 << 20, 1 << 20, None)
    assert (host.numa_nodes, host.interfaces, host.num_iommu_groups) == ([], [], 0)
    assert 1 <= host.num_usable <= host.num_allowed
    assert {"tightwire", "python", "torch"} <= host.software.keys()


def test_numa_network_and_isolation(tmp_path: Path) -> None:
    options = "quiet intel_iommu=on iommu=pt root=/dev/sda1 pcie_acs_override=downstream"
    write(tmp_path, proc__meminfo=MEMINFO, proc__cmdline=options)
    for number, cpus in ((10, "20-21"), (2, "4-5,36-37")):
        write(tmp_path / f"sys/devices/system/node/node{number}", cpulist=cpus)
    net = tmp_path / "sys/class/net"
    write(net / "lo", operstate="unknown", type="772", mtu="65536")
    write(net / "eth0", operstate="up", type="1", mtu="9000", speed="25000")
    write(net / "veth1", operstate="up", type="1", mtu="1500", speed="-1")
    write(net, bonding_masters="bond0")
    (tmp_path / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = read_host(60.0, tmp_path)
    assert host.numa_nodes == ["2: cpus 4-5,36-37", "10: cpus 20-21"]
    assert host.interfaces == ["eth0: up, 25000 Mbit/s, MTU 9000", "veth1: up, speed unknown, MTU 1500"]
    assert host.kernel_options == ["intel_iommu=on", "iommu=pt", "pcie_acs_override=downstream"]
    assert host.num_iommu_groups == 1 and (host.shm_bytes or 0) > 0
    assert (host.acs_redirects is None) == (host.acs_problem is not None)


def test_ports_that_redirect() -> None:
    assert redirecting_ports(LSPCI) == (["00:01.1"], None)
    assert redirecting_ports(LSPCI.replace("ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-", "")) == (
        [],
        None,
    )


def test_hidden_acs_is_not_reported_as_absent() -> None:
    assert redirecting_ports(DENIED) == (None, "lspci shows ACS to root only")
