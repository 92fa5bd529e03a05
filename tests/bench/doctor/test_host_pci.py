"""PCIe links from a tree like sysfs, and ACS from what lspci says."""

from pathlib import Path

from tightwire.bench.doctor.facts import Link
from tightwire.bench.doctor.host import isolation, pci, redirecting_bridges

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


def device(root: Path, path: str, **files: str) -> None:
    """A device at ``path`` below the root port's folder, listed under its own name as sysfs does."""
    folder = root / "sys/devices/pci0000:00" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / folder.name).symlink_to(folder)


def link_files(speed: str, max_speed: str, width: str, max_width: str) -> dict[str, str]:
    return {
        "current_link_speed": speed,
        "max_link_speed": max_speed,
        "current_link_width": width,
        "max_link_width": max_width,
    }


def test_a_link_has_the_limits_of_its_slot(tmp_path: Path) -> None:
    port = link_files("8.0 GT/s PCIe", "8.0 GT/s PCIe", "8", "8")
    device(tmp_path, "0000:00:01.1", **{"class": "0x060400", "vendor": "0x1022", "device": "0x1483"}, **port)
    gpu = {"class": "0x030000", "vendor": "0x10de", "device": "0x2204"}
    device(tmp_path, "0000:00:01.1/0000:01:00.0", **gpu, **link_files("2.5 GT/s PCIe", "16.0 GT/s PCIe", "8", "16"))
    assert pci(tmp_path).links == [
        Link(
            address="0000:01:00.0",
            kind="gpu",
            name="10de:2204",
            gt_per_s=2.5,
            max_gt_per_s=16.0,
            width=8,
            max_width=16,
            slot_max_gt_per_s=8.0,
            slot_max_width=8,
        )
    ]


def test_other_devices_and_devices_without_a_link_are_ignored(tmp_path: Path) -> None:
    full = link_files("16.0 GT/s PCIe", "16.0 GT/s PCIe", "4", "4")
    device(tmp_path, "0000:00:02.0", **{"class": "0x010802"}, **full)
    device(tmp_path, "0000:00:03.0", **{"class": "0x010601"}, **full)
    device(tmp_path, "0000:00:04.0", **{"class": "0x020000"}, **link_files("Unknown", "Unknown", "0", "255"))
    device(tmp_path, "0000:00:05.0", **{"class": "0x020000"})
    (link,) = pci(tmp_path).links
    assert (link.kind, link.slot_max_width) == ("nvme", None)


def test_a_machine_without_pci(tmp_path: Path) -> None:
    assert pci(tmp_path).links == []


def test_ports_that_redirect() -> None:
    assert redirecting_bridges(LSPCI) == (["00:01.1"], None)
    assert redirecting_bridges(LSPCI.replace("ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-", "")) == (
        [],
        None,
    )


def test_hidden_acs_is_not_reported_as_absent() -> None:
    bridges, reason = redirecting_bridges(DENIED)
    assert bridges is None and reason == "lspci shows ACS to root only"


def test_isolation(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text(
        "quiet intel_iommu=on iommu=pt root=/dev/sda1 pcie_acs_override=downstream\n"
    )
    for number in range(3):
        (tmp_path / f"sys/kernel/iommu_groups/{number}").mkdir(parents=True)
    facts = isolation(tmp_path)
    assert facts.num_iommu_groups == 3
    assert facts.kernel_options == ["intel_iommu=on", "iommu=pt", "pcie_acs_override=downstream"]
    assert (facts.redirecting_bridges is None) == (facts.unread_reason is not None)
