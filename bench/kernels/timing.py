"""How ``bench kernels`` measures: seconds of one call, many times, without the host's part where there is a GPU."""

import time
from collections.abc import Callable

import torch

_WARM_UP_CALLS = 3
_CALLS_PER_GRAPH = 20


def seconds_per_call(
    call: Callable[[int], object], device: torch.device, *, repeats: int, limit_s: float
) -> list[float]:
    """``repeats`` samples, or as many as fit into ``limit_s``, but three at least."""
    for i in range(_WARM_UP_CALLS):
        call(i)  # compiles, too
    sample = _graph_sampler(call, device) if device.type == "cuda" else _host_sampler(call)
    samples: list[float] = []
    deadline = time.monotonic() + limit_s
    while len(samples) < 3 or (len(samples) < repeats and time.monotonic() < deadline):
        samples.append(sample())
    return samples


def _host_sampler(call: Callable[[int], object]) -> Callable[[], float]:
    counter = iter(range(1 << 62))

    def sample() -> float:
        start = time.perf_counter()
        call(next(counter))
        return time.perf_counter() - start

    return sample


def _graph_sampler(call: Callable[[int], object], device: torch.device) -> Callable[[], float]:
    """Calls captured in a CUDA graph and replayed: a launch from Python would take longer than a short kernel."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(_CALLS_PER_GRAPH):
            call(i)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _CALLS_PER_GRAPH

    sample()
    return sample
