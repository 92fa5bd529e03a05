"""Probes that need torch: CUDA devices, peer access claimed and tried, a round trip through shared memory."""

from collections.abc import Iterator

import torch
from torch.cuda import nccl

from tightwire.bench.doctor.facts import CudaDevice, CudaFacts, PeerFacts, PeerTest, RoundTripFacts
from tightwire.comm.policy.round_trip import measure_round_trip
from tightwire.comm.transport.peer_check import check_peer_writes, claimed_peers

_ROUND_TRIP_BYTES = 8192  # one generated token of a model 4096 wide, in 16 bits


def cuda() -> CudaFacts:
    available = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if available else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(CudaDevice(index, properties.name, properties.total_memory, capability))
    return CudaFacts(
        torch=str(torch.__version__),  # a class of its own, which JSON does not know
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version())) if available else None,
        available=available,
        devices=devices,
        peers=claimed_peers() if available else [],
    )


def peers() -> Iterator[PeerFacts]:
    """Before each pair says which it is, because a pair that does not work may not come back."""
    tests: list[PeerTest] = []
    for writer, owner in claimed_peers():
        yield PeerFacts(tests=list(tests), under_way=(writer, owner))
        check = check_peer_writes(torch.device("cuda", writer), torch.device("cuda", owner))
        tests.append(PeerTest(writer, owner, *check))
    yield PeerFacts(tests=tests)


def round_trip() -> RoundTripFacts:
    latency = measure_round_trip(_ROUND_TRIP_BYTES)
    return RoundTripFacts(num_bytes=_ROUND_TRIP_BYTES, p50_us=latency.p50_us, p99_us=latency.p99_us)
