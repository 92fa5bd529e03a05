"""What host functions launch, compiled ahead of time for four GPUs: it fits, spills next to nothing, and loads whole vectors.

`make aot` compiles all cases: every host function of kernels/cuda. `make test` compiles those of one rank of Llama 3 8B without codecs.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.kernels.compiled import SHARED_BYTES, compiled
from helpers.kernels.libcuda import needs_launchers

from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.codec.codec_names import has_feedback
from tightwire.kernels.spec.attention import AttentionForm, KeyBias, PackedSequences
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.int8_heads import cache_width
from tightwire.kernels.spec.layer_ops import HeadNorms, NormForm, Rotation, RowProduct, SumNorms
from tightwire.kernels.spec.lora import AdapterSite
from tightwire.kernels.spec.packed import PackedMatrix

pytestmark = needs_launchers
ALL = "TIGHTWIRE_AOT" in os.environ
MOST_SPILLED_BYTES = 32  # of a thread
MORE_SPILLED_BYTES = {  # at 80 and 86; none at 90
    ("_attend_tile", "attention int8 128"): 104,
    ("_packed_product", "packed Q5_1"): 48,  # with Triton 3.8
}
BF16 = torch.bfloat16
Run = Callable[[], object]


def _attention(
    num_heads: int, num_kv_heads: int, head_dim: int, num_decode: int, num_prompt: int, *, stored: torch.dtype = BF16
) -> Run:
    from tightwire.kernels.cuda.attention import paged_attention

    cache = torch.empty(64, num_kv_heads, 16, cache_width(head_dim, stored), dtype=stored)
    q = torch.empty(num_decode + num_prompt, num_heads, head_dim, dtype=BF16)
    starts = [*range(num_decode + 1), *([len(q)] if num_prompt else [])]
    sizes = torch.ones(len(starts) - 1, dtype=torch.int32), torch.zeros(len(starts) - 1, 512, dtype=torch.int32)
    sequences = PackedSequences(torch.tensor(starts, dtype=torch.int32), *sizes, num_decode)
    form = AttentionForm(0.1)
    if stored == torch.int8:  # as of Qwen2: keys are cached without their bias
        cos, sin = torch.empty(2, 256, head_dim // 2)
        form = AttentionForm(0.1, key_bias=KeyBias(torch.empty(num_kv_heads, head_dim), cos, sin))
    return lambda: paged_attention(q, cache, cache.clone(), sequences, form)


def _layer(num_tokens: int) -> Run:
    from tightwire.kernels.cuda import layer_ops

    x, weight = torch.empty(num_tokens, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    gate_up = torch.empty(num_tokens, 28672, dtype=BF16)
    return lambda: (
        layer_ops.add_rms_norm(x, None, SumNorms(weight, NormForm(1e-5))),
        layer_ops.add_rms_norm(x, x.clone(), SumNorms(weight, NormForm(1e-5))),
        layer_ops.swiglu(gate_up),
    )


def _row() -> Run:
    from tightwire.kernels.cuda.linear_row import norm_linear_row

    x, norm = torch.empty(1, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    qkv, gate_up, form = torch.empty(6144, 4096, dtype=BF16), torch.empty(28672, 4096, dtype=BF16), NormForm(1e-5)
    (cos, sin), (keys, values) = torch.empty(2, 1, 64), torch.empty(2, 64, 8, 16, 128, dtype=BF16)
    rotation = Rotation(cos, sin, keys, values, torch.zeros(1, dtype=torch.int32))
    return lambda: (
        norm_linear_row(None, x, norm, form, RowProduct(qkv)),
        norm_linear_row(x, x.clone(), norm, form, RowProduct(qkv, qkv[:, 0].contiguous())),
        norm_linear_row(x, x.clone(), norm, form, RowProduct(qkv, rotation=rotation)),
        norm_linear_row(x, x.clone(), norm, form, RowProduct(gate_up, gelu=False)),
    )


def _rotate(stored: torch.dtype, normed: bool) -> Run:
    from tightwire.kernels.cuda import layer_ops

    qkv, (cos, sin), weight = torch.empty(3, 48, 128, dtype=BF16), torch.empty(2, 3, 64), torch.empty(128, dtype=BF16)
    cache, slots = torch.empty(64, 8, 16, cache_width(128, stored), dtype=stored), torch.zeros(3, dtype=torch.int64)
    norms = HeadNorms(weight, weight.clone(), NormForm(1e-5)) if normed else None
    return lambda: layer_ops.rotate_and_cache(qkv, Rotation(cos, sin, cache, cache.clone(), slots), norms)


def _gelu() -> Run:
    from tightwire.kernels.cuda import layer_ops

    x, weight, gate_up = (
        torch.empty(1, 2304, dtype=BF16),
        torch.empty(2304, dtype=BF16),
        torch.empty(1, 18432, dtype=BF16),
    )
    return lambda: (
        layer_ops.swiglu(gate_up, gelu=True),
        layer_ops.add_rms_norm(x, x.clone(), SumNorms(weight, NormForm(1e-6, 1.0), x_weight_D=weight)),
    )


def _adapters() -> Run:
    from tightwire.kernels.cuda import lora

    x, out = torch.empty(7, 4096, dtype=BF16), torch.empty(7, 6144, dtype=BF16)
    site = AdapterSite.empty(4096, (4096, 5120, 6144), 2, room=(2, 16), like=x)
    return lambda: lora.add_adapters(out, x, site, 1, torch.zeros(7, dtype=torch.int32))


def _codec(name: str) -> Run:
    from tightwire.kernels.cuda import block_quant

    fmt, x = parse_codec(name, feedback=True).format, torch.empty(1 << 18, dtype=BF16)
    assert fmt is not None
    encoded = torch.empty(fmt.encoded_bytes(len(x)), dtype=torch.uint8)
    carried = x.clone() if has_feedback(name) else None
    return lambda: (
        block_quant.encode(x, fmt, encoded, carried),
        block_quant.decode(encoded, fmt, x),
        block_quant.decode(encoded, fmt, x.float(), adds=True),
        block_quant.decode_reduce_encode([encoded] * 2, fmt, fmt, len(x), encoded, carried),
    )


def _sum(name: str = "", out_name: str = "") -> Run:
    from tightwire.kernels.cuda import all_reduce

    x, failure = torch.empty(1 << 18, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    peers = all_reduce.PeerBuffers(torch.zeros(2, dtype=torch.int64), 0, 16 << 20, 32, failure, None)
    if not name:
        return lambda: all_reduce.one_shot(x, x.clone(), peers, 100)
    part = all_reduce.Part(slice_elems=1 << 17, start=0, num_elems=1 << 17)
    fmt, out_fmt = (parse_codec(each, feedback=True).format for each in (name, out_name))
    lost, sums_lost = (x.clone() if has_feedback(each) else None for each in (name, out_name))
    return lambda: all_reduce.two_shot(x, x.clone(), peers, part, fmt, out_fmt, 100, (lost, sums_lost))


def _packed(name: str, dtype: torch.dtype = BF16) -> Run:
    from tightwire.kernels.cuda import linear_packed, packed_blocks

    packed, x = PACKED_FORMATS[name], torch.empty(1, 4096, dtype=dtype)
    blocks = torch.zeros(256, packed.row_bytes(4096), dtype=torch.uint8)
    weight = packed_blocks.order_by_plane(PackedMatrix(blocks, packed))
    return lambda: (linear_packed.linear_packed(x, weight, None), linear_packed.unpack_packed(weight, dtype))


CASES: dict[str, Callable[[], Run]] = {
    "decode": lambda: _attention(32, 8, 128, 1, 0),
    "mixed": lambda: _attention(32, 8, 128, 7, 300),
    "layer": lambda: _layer(1),
    "row": _row,
    "rotation": lambda: _rotate(BF16, normed=False),
    "packed": lambda: _packed("Q4_0"),
    "packed float32": lambda: _packed("Q4_K", torch.float32),
}
MORE: dict[str, Callable[[], Run]] = {
    **{
        f"attention {sizes}": lambda sizes=sizes: _attention(*sizes, 7, 300)
        for sizes in ((64, 8, 128), (32, 8, 64), (8, 1, 256))
    },
    **{f"attention int8 {dim}": lambda dim=dim: _attention(32, 8, dim, 7, 300, stored=torch.int8) for dim in (64, 128)},
    **{f"packed {name}": lambda name=name: _packed(name) for name in PACKED_FORMATS if name != "Q4_0"},
    "rotation normed": lambda: _rotate(BF16, normed=True),
    "rotation int8": lambda: _rotate(torch.int8, normed=False),
    "gelu": _gelu,
    "adapters": _adapters,
    **{
        f"{name}{option}": lambda name=f"{name}{option}": _codec(name)
        for name in ("int8", "int6", "int5", "int4", "int3", "int2")
        for option in ("", "-g64-sym-had")
    },
    **{name: lambda name=name: _codec(name) for name in ("fp8", "int8-g64-sym-had-ef")},
    **{
        f"sum {' '.join(names)}": lambda names=names: _sum(*names)
        for names in ((), ("none", "none"), ("int8", "int8"), ("int4-g64-sym-had-ef", "int8-g64-had-ef"))
    },
}


@pytest.mark.parametrize(
    "capability", SHARED_BYTES if ALL else (86, 90)
)  # the least shared memory; kernels that overlap
@pytest.mark.parametrize("case", [*CASES, *(MORE if ALL else ())])
def test_a_launch(case: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightwire.kernels.cuda import attention_decode

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(attention_decode, "_num_processors", lambda device: 100)
    with compiled(capability) as found:
        (CASES | MORE)[case]()()
    assert found, "a variant of another case: nothing was compiled"
    for kernel in found:
        assert kernel.shared_bytes <= SHARED_BYTES[capability], kernel.name
        assert kernel.spilled_bytes <= MORE_SPILLED_BYTES.get((kernel.name, case), MOST_SPILLED_BYTES), kernel.name
        assert _widest_load(kernel.ptx) >= _least(kernel.name), kernel.name
        if kernel.name in ("_attend_tile", "_attend_chunks", "_shrink"):
            assert "mma" in kernel.ptx, kernel.name
        assert _waits_first(kernel.ptx) == (capability >= 90), kernel.name
        starts_next = "griddepcontrol.launch_dependents" in kernel.ptx
        assert starts_next == (capability >= 90 and "shot" not in kernel.name), kernel.name


def _waits_first(ptx: str) -> bool:
    """True if a kernel waits for the one before, before it touches memory."""
    access = re.search(r"(ld|st|atom|red)\.\S*global|cp\.async\S*global", ptx)
    assert access is not None
    return 0 <= ptx.find("griddepcontrol.wait") < access.start()


def _least(kernel: str) -> int:
    """Bytes that some load takes at once. A thread's codes are 8 of each plane."""
    return 8 if kernel in ("_decode", "_decode_reduce_encode") else 16


def _widest_load(ptx: str) -> int:
    """Bytes that a thread loads from memory at once, to registers or to shared memory, in the widest of all loads."""
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[busf](\d+)\b", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+|\d+),", ptx)
    return max([0, *(int(count or 1) * int(bits) // 8 for count, bits in loads), *(int(size, 0) for size in copies)])


def test_loads_are_told_from_stores() -> None:
    stores = "st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };\n"
    assert _widest_load(f"{stores}@%p1 ld.global.v2.b32 {{ %r1, %r2 }}, [ %rd1 + 0 ];") == 8
    assert _widest_load(f"{stores}@%p1 ld.global.sys.acquire.b64 %rd1, [ %rd2 ];\nld.global.b8 %r1, [ %rd1 ];") == 8
    assert _widest_load(f"{stores}cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4, %r3;") == 4
    assert _widest_load(f"{stores}cp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, 0x10;") == 16
    assert _widest_load(f"{stores}ld.global.L1::evict_last.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %rd1 + 0 ];") == 16
    assert _widest_load(stores) == 0
