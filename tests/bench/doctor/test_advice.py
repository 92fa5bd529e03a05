"""Facts lead to the right problems, notes and options."""

from typing import Any

import pytest
from msgspec.structs import replace

from tightwire.bench.doctor.advice import Advice, Facts, Speed, advise, describe_verdict
from tightwire.bench.doctor.gpus import Driver, Gpu, PeerTest, Torch
from tightwire.bench.doctor.host import Host

HOST = Host(
    cpu="EPYC [9654]",
    kernels="v3",
    num_usable=8,
    num_allowed=8,
    numa_nodes=[],
    total_bytes=1 << 36,
    available_bytes=1 << 36,
    shm_bytes=1 << 33,
    shared_memory_problem=None,
    software={"tightwire": "1", "torch": "2.13.0", "python": "3.12"},
)
GPU = Gpu(0, "RTX 3090", "0000:01:00.0", 24 << 30, "580", 4, 4, 16, 16, "P8")
PAIRS = [(0, 1), (1, 0)]
TESTS = [PeerTest(writer, owner, True, "whole", 20.0) for writer, owner in PAIRS]


def cuda(num: int, peers: list[tuple[int, int]] | None = None, tests: list[PeerTest] | None = None) -> Torch:
    return Torch("13.0", "2.29", ["RTX 3090"] * num, peers or [], tests or [])


TWO = cuda(2, PAIRS, TESTS)


def of(torch: Torch | None = None, driver: Driver | None = None, *, tp: int = 2, **host: Any) -> list[Advice]:
    return advise(Facts(host=replace(HOST, **host), torch=torch or Torch(), driver=driver or Driver()), tp)


def texts(advice: list[Advice], kind: str) -> list[str]:
    return [item.text for item in advice if item.kind == kind]


def options(advice: list[Advice]) -> list[str]:
    return [item.options for item in advice if item.kind == "use"]


def test_a_sound_machine_without_a_gpu() -> None:
    advice = of()
    assert [item.kind for item in advice] == ["use"]
    assert options(advice) == ["--tp 2"] and options(of(tp=1)) == ["--tp 1"]


@pytest.mark.parametrize(
    ("torch", "cores", "speed", "verdict"),
    [
        (
            Torch(),
            2,
            Speed("smollm2-135m", 45.2),
            "2 CPU cores, AVX2; use --tp 2; expect about 45 tokens/s of smollm2-135m",
        ),
        (Torch(), 1, Speed("smollm2-135m", reason="pull it"), "1 CPU core, AVX2; use --tp 2; pull it"),
        (TWO, 2, Speed("smollm2-135m", 200), "2 GPUs (RTX 3090); use --tp 2; expect about 200 tokens/s"),
    ],
)
def test_the_verdict_in_one_sentence(torch: Torch, cores: int, speed: Speed, verdict: str) -> None:
    facts = Facts(host=replace(HOST, num_usable=cores), torch=torch)
    assert describe_verdict(facts, "--tp 2", speed).startswith(verdict)


def test_without_shared_memory_ranks_use_sockets() -> None:
    (advice,) = of(shared_memory_problem="memfd_create is refused")
    assert "sockets: memfd_create is refused" in advice.text and advice.options == "--tp 2"


def test_more_ranks_than_cores_is_a_problem() -> None:
    advice = of(num_usable=3, tp=4)
    (problem,) = texts(advice, "problem")
    assert problem.startswith("4 ranks for 3 cores (a quota allows 3 of 8)")
    assert options(advice) == ["--tp 3"]
    assert options(of(num_usable=1, num_allowed=1)) == ["--tp 1"]


def test_numa_nodes_get_a_note_without_gpus() -> None:
    advice = of(numa_nodes=["0", "1"])
    assert "2 NUMA nodes: with --tp 2" in texts(advice, "note")[0]
    assert options(advice) == ["--tp 2"]
    # A rank that shares its cores' time by a quota is not bound to a node.
    limited = of(numa_nodes=["0", "1"], num_usable=4)
    assert texts(limited, "note") == [] and "NUMA" not in texts(limited, "use")[0]


def test_missing_kernels_are_a_problem_with_a_cure() -> None:
    assert "install a C++ compiler" in texts(of(kernels="spec"), "problem")[0]


def test_two_gpus_that_reach_each_other() -> None:
    advice = of(TWO, Driver([GPU]))
    assert texts(advice, "problem") == []
    assert options(advice) == ["--tp 2", "--comm-error-budget 0.01"]
    assert options(of(TWO, Driver([GPU], has_nvlink=True))) == ["--tp 2"]


def test_claimed_peer_access_that_fails_is_a_problem() -> None:
    lost = [TESTS[0], PeerTest(1, 0, False, "kernel stores: 7 of 9 values arrived wrong", None)]
    advice = of(cuda(2, PAIRS, lost))
    assert "GPU 1 claims access to GPU 0's memory" in texts(advice, "problem")[0]
    assert options(advice)[0] == "--tp 2 --transport process-group"
    hung = replace(cuda(2, PAIRS, TESTS[:1]), under_way=(1, 0))
    failures = {"torch": "did not end within 60 s and was stopped"}
    assert texts(advise(Facts(host=HOST, torch=hung, failures=failures), 2), "problem") == [
        "the probe of torch did not end within 60 s and was stopped",
        "a write from GPU 1 into GPU 0's memory did not finish",
    ]


def test_no_peer_access_at_all() -> None:
    advice = of(cuda(2))
    assert options(advice)[0] == "--tp 2 --transport process-group"
    assert "the driver does not let GPUs write" in texts(advice, "use")[0]


def test_one_gpu_needs_no_transport() -> None:
    assert [item.options for item in of(cuda(1), shm_bytes=64 << 20)] == ["--tp 1"]


def test_a_container_with_little_shared_memory_for_nccl() -> None:
    assert texts(of(TWO, shm_bytes=64 << 20), "problem") == [
        "/dev/shm has 64MiB, too little for NCCL between 2 GPUs: use docker run --shm-size=1g, or a larger emptyDir"
    ]


def test_gpus_that_torch_cannot_use() -> None:
    assert texts(of(Torch(), Driver([GPU])), "problem") == ["the driver has 1 GPUs, but torch 2.13.0 is a CPU build"]
    assert texts(of(cuda(0), Driver([GPU])), "problem") == ["the driver has 1 GPUs, but torch 2.13.0 cannot use them"]
    assert "CUDA_VISIBLE_DEVICES" in texts(of(cuda(1), Driver([GPU, replace(GPU, index=1)])), "note")[0]


def test_a_narrow_link_is_a_problem_and_a_slow_one_only_under_load() -> None:
    assert "runs at x4 of x16" in texts(of(cuda(1), Driver([replace(GPU, width=4)])), "problem")[0]
    slow = replace(GPU, generation=1)
    at_rest = of(cuda(1), Driver([slow]))
    assert texts(at_rest, "problem") == [] and "runs at PCIe 1 of 4; idle" in texts(at_rest, "note")[0]
    assert "although it is not idle" in texts(of(cuda(1), Driver([replace(slow, power_state="P0")])), "problem")[0]
    unknown = replace(GPU, generation=None, max_generation=None, width=None, max_width=None)
    assert of(cuda(1), Driver([unknown]))[0].kind == "use"


def test_inactive_nvlinks() -> None:
    driver = Driver([GPU], has_nvlink=True, nvlink_problems=["GPU 0: 1 of 4 NVLinks are inactive"])
    assert texts(of(TWO, driver), "problem") == driver.nvlink_problems


def test_a_probe_that_failed_is_a_problem_and_problems_come_first() -> None:
    advice = advise(Facts(host=HOST, failures={"GPUs": "hung"}), 2)
    assert (advice[0].kind, advice[0].text) == ("problem", "the probe of GPUs hung")
    assert advice[-1].kind == "use"


def test_a_triton_that_cannot_launch_is_a_problem() -> None:
    assert texts(of(replace(TWO, no_launch="install gcc")), "problem") == ["install gcc"]
