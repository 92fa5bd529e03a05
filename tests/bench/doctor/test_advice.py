"""Facts lead to the right problems, notes and options."""

from msgspec.structs import replace

from tightwire.bench.doctor.advice import Advice, advise
from tightwire.bench.doctor.facts import (
    CpuFacts,
    CudaDevice,
    CudaFacts,
    Facts,
    Gpu,
    GpuFacts,
    IsolationFacts,
    Link,
    MemoryFacts,
    NumaNode,
    NvLinks,
    PciFacts,
    PeerFacts,
    PeerTest,
)
from tightwire.bench.doctor.probing import Finding

CPU = CpuFacts(
    model="x",
    architecture="x86_64",
    num_cpus=8,
    num_allowed=8,
    num_usable=8,
    vector_flags=[],
    virtual=False,
    numa_nodes=[],
)
MEMORY = MemoryFacts(
    total_bytes=1 << 36,
    available_bytes=1 << 36,
    shm_bytes=1 << 33,
    shm_free_bytes=1 << 33,
    shared_memory_problem=None,
    memlock_bytes=None,
)
GPU = Gpu(
    index=0,
    name="RTX 3090",
    memory_bytes=24 << 30,
    driver="580",
    link=Link("0000:01:00.0", "gpu", "", 16.0, 16.0, 16, 16),
    power_state="P8",
)
LINK = Link(
    address="0000:01:00.0",
    kind="gpu",
    name="10de:2204",
    gt_per_s=16.0,
    max_gt_per_s=16.0,
    width=16,
    max_width=16,
    slot_max_gt_per_s=16.0,
    slot_max_width=16,
)
ISOLATION = IsolationFacts(num_iommu_groups=0, kernel_options=[], redirecting_bridges=[], unread_reason=None)
NO_CUDA = CudaFacts(torch="2.13.0+cpu", cuda=None, nccl=None, available=False, devices=[], peers=[])
PAIRS = [(0, 1), (1, 0)]
PEERS = PeerFacts(tests=[PeerTest(writer, owner, True, "whole", 20.0) for writer, owner in PAIRS])


def cuda(num: int, peers: list[tuple[int, int]] | None = None) -> CudaFacts:
    devices = [CudaDevice(index, "RTX 3090", 24 << 30, "8.6") for index in range(num)]
    return CudaFacts(torch="2.13.0", cuda="13.0", nccl="2.29", available=True, devices=devices, peers=peers or [])


def of(*facts: Facts, tp: int = 2) -> list[Advice]:
    return advise([Finding("it", 0.1, fact) for fact in facts], tp)


def texts(advice: list[Advice], kind: str) -> list[str]:
    return [item.text for item in advice if item.kind == kind]


def options(advice: list[Advice]) -> list[str]:
    return [item.options for item in advice if item.kind == "use"]


def test_a_sound_machine_without_a_gpu() -> None:
    advice = of(CPU, MEMORY, NO_CUDA, GpuFacts(absent_reason="none"), PciFacts(links=[LINK]), ISOLATION)
    assert [item.kind for item in advice] == ["use"]
    assert options(advice) == ["--device cpu --tp 2 --transport shared-memory"]


def test_without_shared_memory_ranks_use_the_process_group() -> None:
    (advice,) = of(CPU, replace(MEMORY, shared_memory_problem="memfd_create is refused"), NO_CUDA)
    assert (
        "memfd_create is refused" in advice.text and advice.options == "--device cpu --tp 2 --transport process-group"
    )


def test_more_ranks_than_cores_is_a_problem() -> None:
    advice = of(replace(CPU, num_usable=3), MEMORY, NO_CUDA, tp=4)
    (problem,) = texts(advice, "problem")
    assert problem.startswith("4 ranks for 3 cores (a quota allows 3 of 8)")
    assert options(advice) == ["--device cpu --tp 3 --transport shared-memory"]
    assert options(of(replace(CPU, num_usable=1, num_allowed=1), MEMORY, NO_CUDA)) == ["--device cpu --tp 1"]


def test_numa_nodes_get_a_note_without_gpus() -> None:
    nodes = [NumaNode(node, "0-3", 1 << 34) for node in (0, 1)]
    assert "numactl" in texts(of(replace(CPU, numa_nodes=nodes), MEMORY, NO_CUDA), "note")[0]


def test_two_gpus_that_reach_each_other() -> None:
    gpus = GpuFacts(absent_reason=None, gpus=[GPU])
    advice = of(CPU, MEMORY, cuda(2, PAIRS), PEERS, gpus, ISOLATION)
    assert texts(advice, "problem") == []
    assert options(advice) == ["--device cuda --tp 2 --transport peer-memory", "--comm-error-budget 0.01"]
    with_nvlink = replace(gpus, nvlinks=[NvLinks(0, 4, 0, 100.0)])
    assert options(of(CPU, MEMORY, cuda(2, PAIRS), PEERS, with_nvlink)) == [
        "--device cuda --tp 2 --transport peer-memory"
    ]


def test_claimed_peer_access_that_fails_is_a_problem() -> None:
    lost = PeerFacts(tests=[PEERS.tests[0], PeerTest(1, 0, False, "kernel stores: 7 of 9 values arrived wrong", None)])
    advice = of(CPU, MEMORY, cuda(2, PAIRS), lost)
    assert "GPU 1 claims access to GPU 0's memory" in texts(advice, "problem")[0]
    assert options(advice)[0] == "--device cuda --tp 2 --transport process-group"
    hung = PeerFacts(tests=[PEERS.tests[0]], under_way=(1, 0))
    advice = advise([Finding("peer access", 60, hung, "did not end within 60 s and was stopped")], 2)
    assert texts(advice, "problem") == [
        "the probe of peer access did not end within 60 s and was stopped",
        "a write from GPU 1 into GPU 0's memory did not finish",
    ]


def test_no_peer_access_at_all() -> None:
    advice = of(CPU, MEMORY, cuda(2))
    assert options(advice)[0] == "--device cuda --tp 2 --transport process-group"
    assert "offers no peer access" in texts(advice, "use")[0]


def test_one_gpu_needs_no_transport() -> None:
    advice = of(CPU, replace(MEMORY, shm_bytes=64 << 20), cuda(1), replace(ISOLATION, redirecting_bridges=["00:01.1"]))
    assert [item.options for item in advice] == ["--device cuda --tp 1"]


def test_a_container_with_little_shared_memory_for_nccl() -> None:
    advice = of(CPU, replace(MEMORY, shm_bytes=64 << 20), cuda(2, PAIRS), PEERS)
    assert texts(advice, "problem") == [
        "/dev/shm has 64MiB, too little for NCCL between 2 GPUs: use docker run --shm-size=1g, or a larger emptyDir"
    ]


def test_gpus_that_torch_cannot_use() -> None:
    gpus = GpuFacts(absent_reason=None, gpus=[GPU])
    assert texts(of(NO_CUDA, gpus), "problem") == ["the driver has 1 GPUs, but torch 2.13.0+cpu is a CPU build"]
    broken = replace(cuda(0), available=False)
    assert texts(of(broken, gpus), "problem") == ["the driver has 1 GPUs, but torch 2.13.0 cannot use them"]
    two = replace(gpus, gpus=[GPU, replace(GPU, index=1, link=replace(GPU.link, address="0000:02:00.0"))])
    assert "CUDA_VISIBLE_DEVICES" in texts(of(cuda(1), two), "note")[0]


def test_a_narrow_link_is_a_problem_and_a_slow_one_only_under_load() -> None:
    narrow = replace(LINK, width=4)
    assert "runs at x4 of x16" in texts(of(PciFacts(links=[narrow])), "problem")[0]
    slow = PciFacts(links=[replace(LINK, gt_per_s=2.5)])
    gpus = GpuFacts(absent_reason=None, gpus=[GPU])
    at_rest = of(slow, gpus, cuda(1))
    assert texts(at_rest, "problem") == [] and "runs at 2.5 of 16 GT/s" in texts(at_rest, "note")[0]
    at_work = of(slow, replace(gpus, gpus=[replace(GPU, power_state="P0")]), cuda(1))
    assert "although it is not idle" in texts(at_work, "problem")[0]


def test_a_device_in_a_smaller_slot_gets_a_note() -> None:
    link = replace(LINK, width=8, slot_max_width=8)
    advice = of(PciFacts(links=[link]))
    assert texts(advice, "problem") == []
    assert texts(advice, "note") == ["gpu 0000:01:00.0 is x16 in a slot that is x8"]


def test_links_that_only_the_driver_reports() -> None:
    gpus = GpuFacts(absent_reason=None, gpus=[replace(GPU, link=replace(GPU.link, width=8))])
    assert "x8 of x16" in texts(of(gpus, cuda(1), PciFacts(links=[])), "problem")[0]
    unknown = replace(GPU, link=Link("0000:01:00.0", "gpu", "", None, None, None, None))
    assert of(replace(gpus, gpus=[unknown]), cuda(1), PciFacts(links=[]))[0].kind == "use"


def test_acs_and_iommu_between_two_gpus() -> None:
    redirected = replace(ISOLATION, redirecting_bridges=["00:01.1", "00:03.1"])
    assert "ACS of 00:01.1, 00:03.1" in texts(of(cuda(2, PAIRS), PEERS, redirected), "problem")[0]
    unread = replace(ISOLATION, redirecting_bridges=None, unread_reason="lspci shows ACS to root only")
    assert "to root only" in texts(of(cuda(2, PAIRS), PEERS, unread), "note")[0]
    iommu = replace(ISOLATION, num_iommu_groups=40, kernel_options=["intel_iommu=on"])
    assert "iommu=pt" in texts(of(cuda(2, PAIRS), PEERS, iommu), "note")[0]
    assert texts(of(cuda(2, PAIRS), PEERS, replace(iommu, kernel_options=["iommu=pt"])), "note") == []


def test_inactive_nvlinks() -> None:
    gpus = GpuFacts(absent_reason=None, gpus=[GPU], nvlinks=[NvLinks(0, 3, 1, 75.0)])
    assert texts(of(gpus, cuda(2, PAIRS), PEERS), "problem") == ["GPU 0: 1 of 4 NVLinks are inactive"]


def test_a_probe_that_failed_is_a_problem_and_problems_come_first() -> None:
    advice = advise(
        [Finding("processor", 0.1, CPU), Finding("memory", 0.1, MEMORY), Finding("GPUs", 60, None, "hung")], 2
    )
    assert (advice[0].kind, advice[0].text) == ("problem", "the probe of GPUs hung")
    assert advice[-1].kind == "use"
