"""The operations that ``bench kernels`` times: each has its own memory, the bytes it moves, and a check of its answer.

Every arm has several sets of buffers and uses another one in each call, so that the data of a call is not in a cache.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels import block_quant
from tightwire.kernels.linear import linear
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import BlockFormat
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, dequantize_reference, quantize
from tightwire.kernels.spec.packed_format import PACKED_FORMATS

OPERATIONS = ("encode", "decode", "decode-add", "decode-reduce-encode")
_MAX_SETS = 16
_MAX_WEIGHTS = 128
_SETS_BYTES = 256 << 20  # more than any GPU's last cache
_NUM_SUMMED = 4  # messages that decode-reduce-encode adds
_WARM_UP_CALLS = 3
_CALLS_PER_GRAPH = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """``call(i)`` runs it on the buffers of set i modulo the number of sets; ``is_right`` checks the last results."""

    name: str
    codec: str = ""
    call: Callable[[int], object]
    moved_bytes: int  # read and written by one call, each byte once
    is_right: Callable[[], bool]


def copy_arm(num_bytes: int, device: torch.device) -> Arm:
    """torch's copy of ``num_bytes``: the limit that memory sets."""
    sets = [
        (torch.ones(num_bytes, dtype=torch.uint8, device=device), _bytes(num_bytes, device)) for _ in _sets(num_bytes)
    ]
    return Arm(
        name="copy",
        call=lambda i: sets[i % len(sets)][1].copy_(sets[i % len(sets)][0]),
        moved_bytes=2 * num_bytes,
        is_right=lambda: torch.equal(*sets[0]),
    )


def codec_arms(name: str, num_bytes: int, dtype: torch.dtype, device: torch.device) -> Iterator[Arm]:
    """The four operations of a codec on ``num_bytes`` of numbers; memory is made beforehand, as in an AllReduce."""
    fmt = parse_codec(name).format
    if fmt is None:
        raise ValueError(f"codec {name!r} does not quantize; there is nothing to time")
    num_elems = num_bytes // dtype.itemsize
    generator = torch.Generator(device=device).manual_seed(0)
    x_N = torch.randn(num_elems, generator=generator, device=device).to(dtype)
    encoded = reference.encode_reference(x_N, fmt)
    yield _encode(name, fmt, x_N, encoded)
    yield _decode(name, fmt, x_N, encoded)
    yield _decode_add(name, fmt, x_N, encoded)
    yield _decode_reduce_encode(name, fmt, x_N, encoded)


def _encode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(x_N.clone(), torch.empty_like(encoded)) for _ in _sets(x_N.nbytes)]
    return Arm(
        name="encode",
        codec=name,
        call=lambda i: block_quant.encode(sets[i % len(sets)][0], fmt, sets[i % len(sets)][1]),
        moved_bytes=x_N.nbytes + encoded.nbytes,
        is_right=lambda: torch.equal(sets[0][1], encoded),
    )


def _decode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(encoded.clone(), torch.empty_like(x_N)) for _ in _sets(x_N.nbytes)]
    num_elems, dtype = x_N.numel(), x_N.dtype
    return Arm(
        name="decode",
        codec=name,
        call=lambda i: block_quant.decode(sets[i % len(sets)][0], fmt, num_elems, dtype, sets[i % len(sets)][1]),
        moved_bytes=x_N.nbytes + encoded.nbytes,
        is_right=lambda: torch.equal(sets[0][1], reference.decode_reference(encoded, fmt, num_elems, dtype)),
    )


def _decode_add(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [(encoded.clone(), torch.zeros(x_N.numel(), device=x_N.device)) for _ in _sets(4 * x_N.numel())]

    def is_right() -> bool:
        # The timed calls have accumulated sums; one more call starts from a known sum.
        sets[0][1].fill_(1.0)
        block_quant.decode_add(sets[0][0], fmt, sets[0][1])
        want = torch.ones_like(sets[0][1])
        reference.decode_add_reference(encoded, fmt, want)
        return torch.equal(sets[0][1], want)

    return Arm(
        name="decode-add",
        codec=name,
        call=lambda i: block_quant.decode_add(sets[i % len(sets)][0], fmt, sets[i % len(sets)][1]),
        moved_bytes=encoded.nbytes + 8 * x_N.numel(),
        is_right=is_right,
    )


def _decode_reduce_encode(name: str, fmt: BlockFormat, x_N: Tensor, encoded: Tensor) -> Arm:
    sets = [
        ([encoded.clone() for _ in range(_NUM_SUMMED)], torch.empty_like(encoded))
        for _ in _sets(_NUM_SUMMED * encoded.nbytes)
    ]
    num_elems = x_N.numel()

    def is_right() -> bool:
        bufs = [encoded] * _NUM_SUMMED
        return torch.equal(sets[0][1], reference.decode_reduce_encode_reference(bufs, fmt, fmt, num_elems))

    return Arm(
        name="decode-reduce-encode",
        codec=name,
        call=lambda i: block_quant.decode_reduce_encode(
            sets[i % len(sets)][0], fmt, fmt, num_elems, sets[i % len(sets)][1]
        ),
        moved_bytes=(_NUM_SUMMED + 1) * encoded.nbytes,
        is_right=is_right,
    )


def product_arms(num_rows: int, num_outputs: int, num_inputs: int) -> Iterator[Arm]:
    """``kernels.linear`` on the CPU with weights out of cache: plain weights beside ``F.linear``, and packed weights."""
    x_TD = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(0))
    weight_OD = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield _product(name, linear, x_TD.to(dtype), weight_OD.to(dtype))
        yield _product(f"{name} torch", F.linear, x_TD.to(dtype), weight_OD.to(dtype))
    for packed in PACKED_FORMATS.values():
        yield _product(packed.name, linear, x_TD.bfloat16(), quantize(weight_OD, packed))


def _product(name: str, product: Callable[..., Tensor], x_TD: Tensor, weight: Matrix) -> Arm:
    weights = [weight, *(_copy_of(weight) for _ in _sets(weight.nbytes, _MAX_WEIGHTS)[1:])]
    results: list[Tensor] = []

    def call(i: int) -> None:
        results[:] = [product(x_TD, weights[i % len(weights)])]

    return Arm(
        name=name,
        call=call,
        moved_bytes=weight.nbytes,
        is_right=lambda: _is_product(results[0], x_TD, weight),
    )


def _copy_of(weight: Matrix) -> Matrix:
    return weight.clone() if isinstance(weight, Tensor) else PackedMatrix(weight.blocks_OB.clone(), weight.format)


def _is_product(result_TO: Tensor, x_TD: Tensor, weight: Matrix) -> bool:
    """Within what rounding inputs and result to ``x_TD.dtype``, and sums in float32, can amount to."""
    plain_OD = dequantize_reference(weight, torch.float32) if isinstance(weight, PackedMatrix) else weight
    exact_TO = x_TD.double() @ plain_OD.double().T
    magnitude_TO = x_TD.double().abs() @ plain_OD.double().abs().T
    bound_TO = (
        torch.finfo(x_TD.dtype).eps * magnitude_TO + x_TD.shape[1] * torch.finfo(torch.float32).eps * magnitude_TO
    )
    return bool(((result_TO.double() - exact_TO).abs() <= bound_TO).all())


def _sets(num_bytes: int, most: int = _MAX_SETS) -> range:
    return range(max(1, min(most, _SETS_BYTES // max(1, num_bytes))))


def _bytes(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def seconds_per_call(
    call: Callable[[int], object], device: torch.device, *, repeats: int, limit_s: float
) -> list[float]:
    """Seconds of one call, ``repeats`` times or as often as fit into ``limit_s``, but at least three times."""
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
