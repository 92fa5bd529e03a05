"""The operations that ``bench kernels`` times: each has its own memory, the bytes it moves, and a check of its answer."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_quant as reference

OPERATIONS = ("encode", "decode", "decode-add", "decode-reduce-encode")
_MAX_SETS = 16
_SETS_BYTES = 256 << 20  # more than any GPU's last cache
_NUM_SUMMED = 4  # messages that decode-reduce-encode adds
_CALLS_PER_GRAPH = 20
_WARM_UP_S = 0.1  # of a GPU: the clock of one that waited, for a compilation too, rises only under load


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """``call(i)`` runs it on the buffers of set i modulo the number of sets; ``is_right`` checks the answer."""

    name: str
    call: Callable[[int], object]
    moved_bytes: int  # read and written by one call, each byte once
    is_right: Callable[[], bool]


def copy_arm(num_bytes: int, device: torch.device) -> Arm:
    """torch's copy of ``num_bytes``: the limit that memory sets."""
    x_N = torch.arange(num_bytes, device=device).to(torch.uint8)
    return _arm("copy", x_N, x_N, lambda x, out: out.copy_(x), 2 * num_bytes, lambda: x_N)


def codec_arms(name: str, num_bytes: int, dtype: torch.dtype, device: torch.device) -> Iterator[Arm]:
    """The four operations of a codec on ``num_bytes`` of numbers; memory is made beforehand, as in an AllReduce."""
    fmt = parse_codec(name).format
    assert fmt is not None, "the options refuse codecs that do not quantize"
    n = num_bytes // dtype.itemsize
    generator = torch.Generator(device=device).manual_seed(0)
    x_N = torch.randn(n, generator=generator, device=device).to(dtype)
    encoded = reference.encode_reference(x_N, fmt)
    plain, packed, bufs = x_N.nbytes, encoded.nbytes, [encoded] * _NUM_SUMMED

    def added() -> Tensor:
        sum_N = torch.ones(n, device=device)
        reference.decode_add_reference(encoded, fmt, sum_N)
        return sum_N

    yield _arm(
        OPERATIONS[0], x_N, encoded, lambda x, out: block_quant.encode(x, fmt, out), plain + packed, lambda: encoded
    )
    yield _arm(
        OPERATIONS[1],
        encoded,
        x_N,
        lambda buf, out: block_quant.decode(buf, fmt, n, dtype, out),
        plain + packed,
        lambda: reference.decode_reference(encoded, fmt, n, dtype),
    )
    yield _arm(
        OPERATIONS[2],
        encoded,
        torch.zeros(n, device=device),
        lambda buf, sum_N: block_quant.decode_add(buf, fmt, sum_N),
        packed + 8 * n,
        added,
    )
    yield _arm(
        OPERATIONS[3],
        bufs,
        encoded,
        lambda bufs, out: block_quant.decode_reduce_encode(bufs, fmt, fmt, n, out),
        (_NUM_SUMMED + 1) * packed,
        lambda: reference.decode_reduce_encode_reference(bufs, fmt, fmt, n),
    )


def _arm(
    name: str,
    source: Any,
    target: Tensor,
    run: Callable[[Any, Tensor], object],
    moved_bytes: int,
    expected: Callable[[], Tensor],
) -> Arm:
    """``source``: a tensor or a list of them; ``expected``: the output of one run that starts from ones."""
    # Each call uses another set of buffers, so that its data is not in a cache.
    sets = [
        ([x.clone() for x in source] if isinstance(source, list) else source.clone(), target.clone())
        for _ in range(max(1, min(_MAX_SETS, _SETS_BYTES // max(1, moved_bytes))))
    ]

    def is_right() -> bool:
        own, out = sets[0]
        out.fill_(1)
        run(own, out)
        return torch.equal(out, expected())

    return Arm(name=name, call=lambda i: run(*sets[i % len(sets)]), moved_bytes=moved_bytes, is_right=is_right)


def seconds_per_call(
    call: Callable[[int], object], device: torch.device, *, repeats: int, limit_s: float
) -> list[float]:
    """Seconds of one call, ``repeats`` times or as often as fit into ``limit_s``, but at least three times."""
    for i in range(3):
        call(i)  # compiles, too
    samples: list[float] = []

    def on_host() -> float:
        start = time.perf_counter()
        call(len(samples))
        return time.perf_counter() - start

    sample = _graph_sampler(call, device) if device.type == "cuda" else on_host
    deadline = time.monotonic() + limit_s
    while len(samples) < 3 or (len(samples) < repeats and time.monotonic() < deadline):
        samples.append(sample())
    return samples


def _graph_sampler(call: Callable[[int], object], device: torch.device) -> Callable[[], float]:
    """Calls captured in a CUDA graph and replayed: a launch from Python would take longer than a short kernel."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call(0)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), stream=stream):
        for i in range(_CALLS_PER_GRAPH):
            call(i)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _CALLS_PER_GRAPH

    begin = time.monotonic()
    while time.monotonic() < begin + _WARM_UP_S:
        sample()
    return sample
