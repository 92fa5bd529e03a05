"""The page shows all findings within 80 columns."""

import io

from msgspec.structs import replace
from rich.console import Console

from tightwire.bench.doctor.advice import Advice
from tightwire.bench.doctor.cli import show
from tightwire.bench.doctor.facts import (
    CpuFacts,
    CudaDevice,
    CudaFacts,
    Facts,
    Gpu,
    GpuFacts,
    Interface,
    IsolationFacts,
    Link,
    MemoryFacts,
    NetworkFacts,
    NumaNode,
    NvLinks,
    PciFacts,
    PeerFacts,
    PeerTest,
    VersionFacts,
)
from tightwire.bench.doctor.probing import Finding

FACTS: tuple[Facts, ...] = (
    CpuFacts("EPYC [9654]", "x86_64", 192, 96, 48, ["avx2"], True, [NumaNode(1, "48-95", 1 << 38)]),
    MemoryFacts(1 << 38, 1 << 37, 64 << 20, 60 << 20, "memfd_create is refused", 8 << 20),
    PciFacts([Link("0000:01:00.0", "gpu", "10de:2204", 2.5, 16.0, 8, 16, 8.0, 8)]),
    IsolationFacts(40, ["iommu=pt"], None, "lspci shows ACS to root only"),
    GpuFacts(
        None,
        [Gpu(0, "RTX 3090", 24 << 30, "580.65", Link("0000:01:00.0", "gpu", "", 2.5, 16.0, None, 16), None)],
        [NvLinks(0, 3, 1, 75.0)],
    ),
    CudaFacts("2.13.0", "13.0", "2.29.1", True, [CudaDevice(i, "RTX 3090", 24 << 30, "8.6") for i in (0, 1)], [(0, 1)]),
    PeerFacts([PeerTest(0, 1, False, "copy engine: 7 values arrived wrong", None)], (1, 0)),
    NetworkFacts([Interface("eth0", "up", None, 9000)]),
    VersionFacts("3.12.1", "6.8.0", "glibc 2.39", {"torch": "2.13.0", "numpy": "2.4.6"}, "v4-bf16"),
)


def page(findings: list[Finding], advice: list[Advice]) -> str:
    out = io.StringIO()
    show(findings, advice, Console(file=out, width=80, highlight=False))
    return out.getvalue()


def test_every_kind_of_facts_is_shown_within_80_columns() -> None:
    text = page([Finding(f"probe {number}", 0.1, facts) for number, facts in enumerate(FACTS)], [])
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for part in (
        "EPYC [9654] (x86_64, in a virtual machine)",
        "48 usable, 96 allowed, 192 online",
        "NUMA 1 cpus 48-95, 256GiB",
        "60MiB free of 64MiB",
        "memfd_create is refused",
        "0000:01:00.0 10de:2204, x8 of x16, 2.5 of 16 GT/s, slot x8 8 GT/s",
        "40 groups",
        "unknown: lspci shows ACS to root only",
        "0000:01:00.0, x? of x16, 2.5 of 16 GT/s, power state unknown",
        "3 of 4 active, 75 GB/s together",
        "claimed for 1 of 2 pairs",
        "GPU 0 -> 1 WRONG: copy engine: 7 values arrived wrong",
        "GPU 1 -> 0 did not finish",
        "eth0 up, speed unknown, MTU 9000",
        "torch 2.13.0, numpy 2.4.6",
        "v4-bf16",
    ):
        assert part in words, part


def test_a_failed_probe_and_the_advice_are_shown() -> None:
    findings = [Finding("GPUs", 60.0, None, "did not end within 60 s and was stopped")]
    advice = [Advice("problem", "the driver [hangs]"), Advice("use", "no GPU", "--device cpu --tp 2")]
    words = " ".join(page(findings, advice).split())
    assert "GPUs the probe did not end within 60 s and was stopped" in words
    assert "problem the driver [hangs]" in words
    assert "use --device cpu --tp 2 no GPU" in words


def test_facts_of_a_stopped_probe_are_shown_with_the_reason() -> None:
    peers = PeerFacts([PeerTest(0, 1, True, "whole", 21.04)], (1, 0))
    words = " ".join(page([Finding("peers", 60.0, peers, "did not end")], []).split())
    assert "peers GPU 0 -> 1 ok: whole, 21.0 GB/s GPU 1 -> 0 did not finish the probe did not end" in words
    assert isinstance(FACTS[1], MemoryFacts) and "/dev/shm       none" in page(
        [Finding("memory", 0.1, replace(FACTS[1], shm_bytes=None))], []
    )
