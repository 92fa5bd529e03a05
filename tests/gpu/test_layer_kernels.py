"""The element-wise kernels of a layer on a GPU against the references on the CPU."""

import pytest
import torch
from helpers.kernels.packed_blocks import common_blocks, each_format, minima_of

from tightwire.kernels.layer_ops import add_rms_norm, norm_linear, rotate_and_cache, swiglu
from tightwire.kernels.linear import linear
from tightwire.kernels.packed import arrange
from tightwire.kernels.spec.gguf_blocks import Q4_0, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.layer_ops import (
    NormForm,
    Rotation,
    RowProduct,
    SumNorms,
    add_rms_norm_reference,
    norm_linear_reference,
    rotate_and_cache_reference,
    swiglu_reference,
)
from tightwire.kernels.spec.packed import PackedMatrix, dequantize_reference, quantize

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"), [(1, 9, 3, 64), (700, 32, 8, 128), (33, 8, 1, 80)]
)
def test_rotation_and_cache_to_the_bit(
    dtype: torch.dtype, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> None:
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.randn(num_tokens, head_dim // 2) * 100
    slots = torch.randperm(1024)[:num_tokens].int()
    cos, sin = angles.cos(), angles.sin()
    k_want, v_want = torch.zeros(2, 64, num_kv_heads, 16, head_dim, dtype=dtype)
    k_got, v_got = k_want.to(device), v_want.to(device)
    want = rotate_and_cache_reference(qkv, Rotation(cos, sin, k_want, v_want, slots))
    got = rotate_and_cache(qkv.to(device), Rotation(cos.to(device), sin.to(device), k_got, v_got, slots.to(device)))
    assert torch.equal(got.cpu(), want)
    assert torch.equal(k_got.cpu(), k_want) and torch.equal(v_got.cpu(), v_want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (5, 37), (700, 14336)])
def test_swiglu(dtype: torch.dtype, num_tokens: int, width: int, device: torch.device) -> None:
    """As in the interpreter (``tests/kernels/cuda/test_layer_ops``), with the approximate exponential of a GPU."""
    gate_up = (torch.randn(num_tokens, 2 * width) * 5).to(dtype)
    got, want = swiglu(gate_up.to(device)).cpu(), swiglu_reference(gate_up)
    units = (gate_up.chunk(2, -1)[0].float().abs() + 8) * torch.finfo(torch.float32).eps
    if dtype != torch.float32:
        units = units + 2 * torch.finfo(dtype).eps
    # Below float16's least normal number its steps no longer shrink.
    least = 2 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps + 1e-35
    assert ((got.double() - want.double()).abs() <= want.double().abs() * units + least).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype, device: torch.device) -> None:
    """The sum to the bit; the rest within the roundings of its type (``tests/kernels/cuda/test_layer_ops``)."""
    x, residual, weight = (
        torch.randn(300, 4096).to(dtype),
        torch.randn(300, 4096).to(dtype),
        torch.randn(4096).to(dtype),
    )
    got, total = add_rms_norm(x.to(device), residual.to(device), SumNorms(weight.to(device), NormForm(1e-5)))
    want, want_total = add_rms_norm_reference(x, residual, SumNorms(weight, NormForm(1e-5)))
    assert torch.equal(total.cpu(), want_total)
    units = 2 * torch.finfo(dtype).eps + 4096 * torch.finfo(torch.float32).eps
    assert ((got.cpu().double() - want.double()).abs() <= units * want.double().abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [None, False])
def test_a_rows_norm_and_product(gelu: bool | None, dtype: torch.dtype, device: torch.device) -> None:
    """The sum to the bit, the product within the roundings of its numbers, as in the interpreter."""
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((1, 4096), (1, 4096), (6144, 4096)))
    norm = torch.randn(4096).to(dtype)
    form = NormForm(1e-5)
    given = x.to(device), residual.to(device), norm.to(device)
    got, total = norm_linear(*given, form, RowProduct(weight.to(device), gelu=gelu))
    want, want_total = norm_linear_reference(x, residual, norm, form, RowProduct(weight, gelu=gelu))
    assert torch.equal(total.cpu(), want_total)
    units = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.cpu(), want, rtol=units, atol=0.02 if gelu is None else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_rotated_product(dtype: torch.dtype, device: torch.device) -> None:
    """As the rotation of the product in a kernel of its own, which rounds the product first."""
    x, residual, norm = (torch.randn(shape, device=device).to(dtype) for shape in ((1, 4096), (1, 4096), (4096,)))
    weight, (cos, sin) = torch.randn(6144, 4096, device=device).to(dtype), torch.randn(2, 1, 64, device=device)
    cache, slots = torch.randn(2, 4, 8, 16, 128).to(device, dtype), torch.tensor([37], dtype=torch.int32, device=device)
    got_cache, want_cache = cache.clone(), cache.clone()
    own, apart = (Rotation(cos, sin, each[0], each[1], slots) for each in (got_cache, want_cache))
    got, _ = norm_linear(x, residual, norm, NormForm(1e-5), RowProduct(weight, rotation=own))
    product, _ = norm_linear(x, residual, norm, NormForm(1e-5), RowProduct(weight))
    want = rotate_and_cache(product.view(1, 48, 128), apart)
    bound = 2 * torch.finfo(dtype).eps * float(product.abs().max() * (cos.abs() + sin.abs()).max())
    torch.testing.assert_close(got, want.flatten(1), rtol=0, atol=bound)
    torch.testing.assert_close(got_cache, want_cache, rtol=0, atol=bound)
    assert int((got_cache != cache).any(-1).sum()) == 2 * 8  # a token's keys and values


@pytest.mark.parametrize("dtype", DTYPES)
@each_format
def test_packed_product(packed: PackedFormat, dtype: torch.dtype, device: torch.device) -> None:
    """Few rows: one rounding to the type, and those of a float32 sum. Many: torch's own."""
    num_columns = max(512, packed.block_elems)
    weight, bias = common_blocks(packed, 1000, num_columns), torch.randn(1000).to(dtype)
    on_device, ordered = (PackedMatrix(weight.blocks_OB.to(device), weight.format) for _ in range(2))
    ordered = arrange(ordered)
    numbers, minima = dequantize_reference(weight, torch.float32).double(), minima_of(weight).double()
    for num_tokens in (1, 17):
        x = torch.randn(num_tokens, num_columns).to(dtype)
        product = linear(x.to(device), on_device, bias.to(device))
        assert torch.equal(linear(x.to(device), ordered, bias.to(device)), product)
        got = product.cpu().double()
        want = x.double() @ numbers.T + bias.double()
        sizes = x.double().abs() @ ((numbers - minima).abs() + minima.abs()).T + bias.double().abs()
        bound = (num_columns + 2) * torch.finfo(torch.float32).eps * sizes
        assert ((got - want).abs() <= bound + torch.finfo(dtype).eps / 2 * (want.abs() + bound)).all()


@each_format
def test_prompts_of_packed_weights(packed: PackedFormat, device: torch.device) -> None:
    """Of many rows, which torch multiplies with the unpacked numbers."""
    weight = common_blocks(packed, 40, max(512, packed.block_elems))
    numbers = dequantize_reference(weight, torch.float32)
    x = torch.randn(70, numbers.shape[1]).to(device)
    want = linear(x, numbers.to(device), None)
    on_device = PackedMatrix(weight.blocks_OB.to(device), weight.format)
    assert torch.equal(linear(x, on_device, None, num_decode_rows=0), want)
    assert torch.equal(linear(x, arrange(on_device), None, num_decode_rows=0), want)


@pytest.mark.parametrize("packed", [Q8_0, Q4_0, Q4_1], ids=lambda packed: packed.name)
def test_quantized_on_the_device(packed: PackedFormat, device: torch.device) -> None:
    """Has the CPU's bits, also of numbers whose scale a division by an inverse would round otherwise."""
    x = torch.randn(2000, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(quantize(x.to(device), packed).blocks_OB.cpu(), quantize(x, packed).blocks_OB)


def test_all_in_one_captured_graph(device: torch.device) -> None:
    """Replayed on new numbers, the captured kernels give what they give when called."""
    qkv, gate_up = torch.zeros(4, 48, 128, device=device).bfloat16(), torch.zeros(4, 2048, device=device).bfloat16()
    cos, sin = torch.ones(4, 64, device=device), torch.zeros(4, 64, device=device)
    slots = torch.tensor([3, 17, -1, 40], dtype=torch.int32, device=device)
    k_cache, v_cache = torch.zeros(2, 4, 8, 16, 128, dtype=torch.bfloat16, device=device)
    rotation = Rotation(cos, sin, k_cache, v_cache, slots)
    rotate_and_cache(qkv, rotation)  # compiles
    swiglu(gate_up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, gated = rotate_and_cache(qkv, rotation), swiglu(gate_up)
    for seed in range(3):
        generator = torch.Generator(device).manual_seed(seed)
        for tensor in (qkv, gate_up):
            tensor.copy_(torch.randn(tensor.shape, device=device, generator=generator))
        graph.replay()
        k_replayed, v_replayed = k_cache.clone(), v_cache.clone()
        assert torch.equal(q, rotate_and_cache(qkv, rotation))
        assert torch.equal(gated, swiglu(gate_up))
        assert torch.equal(k_replayed, k_cache) and torch.equal(v_replayed, v_cache)
        assert int((k_cache != 0).any(-1).any(1).sum()) == 3  # the padding row stored nothing
