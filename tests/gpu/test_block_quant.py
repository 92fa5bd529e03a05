"""Block quantization on a GPU: byte for byte the reference on the CPU, at sizes that fill the device, past 2^31 numbers."""

import pytest
import torch

from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels import block_quant
from tightwire.kernels.spec import block_quant as reference
from tightwire.kernels.spec.block_format import PLANES, BlockFormat

pytestmark = pytest.mark.gpu

NAMES = [f"int{bits}{group}{option}" for bits in PLANES for group in ("", "-g32") for option in ("", "-sym", "-had")]
NUM_ELEMS = (1 << 20) + 77


def _format(name: str) -> BlockFormat:
    fmt = parse_codec(name).format
    assert fmt is not None
    return fmt


def _numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes from 2^-8 to 2^8, with an inf and a NaN."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-8, 9, (NUM_ELEMS,), generator=generator).float())
    x_N = torch.randn(NUM_ELEMS, generator=generator) * scales
    x_N[1000], x_N[2000] = torch.inf, torch.nan
    return x_N.to(dtype)


@pytest.mark.parametrize("name", [*NAMES, "fp8", "fp8-g64"])
def test_the_references_bytes(name: str, device: torch.device) -> None:
    fmt = _format(name)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x_N = _numbers(dtype)
        want = reference.encode_reference(x_N, fmt)
        encoded = block_quant.encode(x_N.to(device), fmt)
        assert torch.equal(encoded.cpu(), want), f"encode {dtype}"
        decoded = block_quant.decode(encoded, fmt, NUM_ELEMS, dtype).cpu()
        decoded_reference = reference.decode_reference(want, fmt, NUM_ELEMS, dtype)
        torch.testing.assert_close(decoded, decoded_reference, rtol=0, atol=0, equal_nan=True)
        total = torch.ones(NUM_ELEMS, device=device)
        block_quant.decode_add(encoded, fmt, total)
        expected = torch.ones(NUM_ELEMS)
        reference.decode_add_reference(want, fmt, expected)
        torch.testing.assert_close(total.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "out_name"),
    [
        ("int8", "int8"),
        ("int4", "int8"),
        ("int5", "int5"),
        ("int4-g32", "int8"),
        ("int4-had", "int4-had"),
        ("fp8", "int3-sym"),
    ],
)
def test_decode_reduce_encode(name: str, out_name: str, device: torch.device) -> None:
    fmt, out_fmt = _format(name), _format(out_name)
    bufs = [reference.encode_reference(_numbers(torch.bfloat16, seed), fmt) for seed in range(4)]
    want = reference.decode_reduce_encode_reference(bufs, fmt, out_fmt, NUM_ELEMS)
    got = block_quant.decode_reduce_encode([buf.to(device) for buf in bufs], fmt, out_fmt, NUM_ELEMS)
    assert torch.equal(got.cpu(), want)


@pytest.mark.slow
def test_more_numbers_than_32_bits_count(device: torch.device) -> None:
    fmt, num_elems = _format("int8"), (1 << 31) + 4096 + 5
    needed = 2 * num_elems * 2 + fmt.encoded_bytes(num_elems)
    if torch.cuda.mem_get_info(device)[0] < needed * 1.1:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free device memory")
    x_N = torch.zeros(num_elems, dtype=torch.bfloat16, device=device)
    x_N[-5000:] = torch.linspace(-3, 3, 5000, device=device)
    decoded = block_quant.decode(block_quant.encode(x_N, fmt), fmt, num_elems, torch.bfloat16)
    start = num_elems // 128 * 128 - 4096  # whole groups near the end, by themselves
    tail = reference.encode_reference(x_N[start:].cpu(), fmt)
    assert torch.equal(decoded[start:].cpu(), reference.decode_reference(tail, fmt, num_elems - start, torch.bfloat16))
