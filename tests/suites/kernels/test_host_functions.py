"""What host functions launch, compiled ahead of time for four GPUs: it fits, spills next to nothing, and loads whole vectors.

`make aot` compiles all cases; `make test` those of one rank of Llama 3 8B without codecs.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.kernels.compiled import SHARED_BYTES, Compiled, compiled
from helpers.kernels.interpreted import needs_triton

from tightwire.comm.codec.codec import parse_codec
from tightwire.kernels.spec.attention import AttentionForm, PackedSequences
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.layer_ops import NormForm
from tightwire.kernels.spec.packed import PackedMatrix

pytestmark = needs_triton
ALL = "TIGHTWIRE_AOT" in os.environ
MOST_SPILLED_BYTES = 32  # of a thread
BF16 = torch.bfloat16
Run = Callable[[], object]


def _attention(num_heads: int, num_kv_heads: int, head_dim: int, num_decode: int, num_prompt: int) -> Run:
    from tightwire.kernels.cuda.attention import paged_attention

    cache = torch.empty(64, num_kv_heads, 16, head_dim, dtype=BF16)
    q = torch.empty(num_decode + num_prompt, num_heads, head_dim, dtype=BF16)
    starts = [*range(num_decode + 1), *([len(q)] if num_prompt else [])]
    sizes = torch.ones(len(starts) - 1, dtype=torch.int32), torch.zeros(len(starts) - 1, 512, dtype=torch.int32)
    sequences = PackedSequences(torch.tensor(starts, dtype=torch.int32), *sizes, num_decode)
    return lambda: paged_attention(q, cache, cache.clone(), sequences, AttentionForm(0.1))


def _layer(num_tokens: int) -> Run:
    from tightwire.kernels.cuda import layer_ops

    x, weight = torch.empty(num_tokens, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    gate_up = torch.empty(num_tokens, 28672, dtype=BF16)
    return lambda: (
        layer_ops.add_rms_norm(x, None, weight, NormForm(1e-5)),
        layer_ops.add_rms_norm(x, x.clone(), weight, NormForm(1e-5)),
        layer_ops.swiglu(gate_up),
    )


def _codec(name: str) -> Run:
    from tightwire.kernels.cuda import block_quant

    fmt, x = parse_codec(name).format, torch.empty(1 << 18, dtype=BF16)
    assert fmt is not None
    encoded = torch.empty(fmt.encoded_bytes(len(x)), dtype=torch.uint8)
    return lambda: (
        block_quant.encode(x, fmt),
        block_quant.decode(encoded, fmt, len(x), BF16),
        block_quant.decode_reduce_encode([encoded] * 2, fmt, fmt, len(x)),
    )


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
    "packed": lambda: _packed("Q4_0"),
    "packed float32": lambda: _packed("Q4_K", torch.float32),
}
MORE: dict[str, Callable[[], Run]] = {
    **{
        f"attention {sizes}": lambda sizes=sizes: _attention(*sizes, 7, 300)
        for sizes in ((64, 8, 128), (32, 8, 64), (8, 1, 256))
    },
    **{f"packed {name}": lambda name=name: _packed(name) for name in PACKED_FORMATS if name != "Q4_0"},
    **{
        f"{name}{option}": lambda name=f"{name}{option}": _codec(name)
        for name in ("int8", "int6", "int5", "int4", "int3", "int2")
        for option in ("", "-g64-sym-had")
    },
}


@pytest.mark.parametrize("capability", SHARED_BYTES)
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
        assert kernel.spilled_bytes <= MOST_SPILLED_BYTES, kernel.name
        if kernel.name != "_decode_reduce_encode":  # planes of codes are read in smaller pieces
            assert _loads_vectors(kernel), kernel.name
        if kernel.name in ("_attend_tile", "_attend_chunks"):
            assert "mma" in kernel.ptx, kernel.name


def _loads_vectors(kernel: Compiled) -> bool:
    """Whether 16 bytes are loaded at once. Keys and values of attention are copied to shared memory in such pieces."""
    return "cp.async.cg" in kernel.ptx or ".v4" in kernel.ptx
