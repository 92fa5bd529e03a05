"""The Triton kernels compile for GPUs without having one, which finds code that only the interpreter accepts.

And what they compile to keeps two promises: nothing flushes denormals or fuses a multiplication with an addition where an
encoder's bits depend on it, and 16-bit numbers are loaded in whole vectors. `make aot` compiles all cases, `make test` those
that differ most.
"""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernels.compiled import compiled
from helpers.kernels.interpreted import needs_triton
from helpers.kernels.libcuda import needs_launchers

from tightwire.comm.codec.codec import parse_codec

pytestmark = needs_triton

A100, L40, H100 = 80, 89, 90
_AOT = "TIGHTWIRE_AOT" in os.environ
SHARED_BYTES = {A100: 163 << 10, L40: 99 << 10, H100: 227 << 10}  # that one program may have


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _ptx(kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, Any]) -> str:
    return _compiled(kernel, capability, types, constants).asm["ptx"]


def _compiled(kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, Any], **options: int) -> Any:
    """What ``kernel`` compiles to, given the types of its other arguments; pointers and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "i32") if name not in constants else "constexpr" for name in names}
    aligned = [(i,) for i, name in enumerate(names) if str(signature[name]).startswith(("*", "i"))]
    tuples = [(i, signature[name]) for i, name in enumerate(names) if isinstance(signature[name], tuple)]
    aligned += [(i, j) for i, parts in tuples for j, part in enumerate(parts) if part.startswith(("*", "i"))]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants}
        | {(i, j): None for i, parts in tuples for j, part in enumerate(parts) if part == "constexpr"},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": False, **options})


@pytest.mark.parametrize(
    ("name", "capability"),
    [("int5", A100), ("int3-sym", H100), ("fp8", A100), *([("int5-had", A100), ("int8", H100)] if _AOT else ())],
)
def test_encode_and_decode(name: str, capability: int) -> None:
    from tightwire.kernels.cuda.block_quant import _decode, _encode
    from tightwire.kernels.cuda.numbers import make_tiling

    fmt = parse_codec(name).format
    assert fmt is not None
    constants = {"fmt": fmt, "tiling": make_tiling(1 << 20, fmt)}
    encoded = _ptx(_encode, capability, {"x": "*bf16", "out": "*u8"}, {**constants, "carried": None})
    decoded = _ptx(_decode, capability, {"buf": "*u8", "out": "*bf16"}, {**constants, "ADDS": False})
    for ptx in (encoded, decoded):
        assert "ftz" not in ptx and "div.full" not in ptx
    # All are exact: a number or its opposite and another, a code times a power of two less a whole number, an exact product and a zero.
    assert ("fma.rn" in encoded) == fmt.hadamard and ("fma.rn" in decoded) == (not fmt.float8 or fmt.has_zeros)
    assert "ld.global.v4" in encoded and "st.global.v4" in decoded


def _listing(kernel: Any, path: Path) -> list[tuple[int, str]]:
    """The addresses of a kernel's instructions, and these."""
    import triton

    path.write_bytes(kernel.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@\S+ )?(.*?)\s*;", listing, re.MULTILINE)
    return [(int(address, 16), instruction) for address, instruction in found]


def _instructions(kernel: Any, path: Path) -> int:
    """What a thread executes, without the division's rare path, which follows the program's end."""
    names = [instruction.split()[0] for _, instruction in _listing(kernel, path)]
    return len(names) - names[::-1].index("EXIT")


def _longest_loop(kernel: Any, path: Path) -> int:
    """The instructions between a branch back and its target."""
    listing = _listing(kernel, path)
    targets = [(address, re.fullmatch(r"BRA.* 0x([0-9a-f]+)", each)) for address, each in listing]
    starts = [(int(target[1], 16), address) for address, target in targets if target]
    return max(sum(start <= address <= end for address, _ in listing) for start, end in starts if start < end)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("fp8", (7.3, 4.4, 16.7)),
        ("int4-had", (18.0, 14.5, 21.6)),
        *([("int5", (12.4, 6.2, 27.5)), ("int8", (9.9, 5.8, 23.9))] if _AOT else ()),
        *([("int6", (12.6, 6.6, 27.3)), ("int4", (9.8, 5.8, 21.4))] if _AOT else ()),
    ],
)
@needs_launchers
def test_codecs_take_few_instructions(name: str, most: tuple[float, float, float], tmp_path: Path) -> None:
    """To encode, to decode and to add four, for each number; scales and zeros take an access each, rotations no shared memory."""
    from tightwire.kernels.cuda.block_quant import _decode, _decode_reduce_encode, _encode
    from tightwire.kernels.cuda.numbers import make_tiling

    fmt = parse_codec(name).format
    assert fmt is not None
    tilings = [make_tiling(1 << 20, fmt, encodes=encodes) for encodes in (True, False, True)]
    encodes, decodes = [{"fmt": fmt, "tiling": tiling} for tiling in tilings[:2]]
    with compiled(H100):  # what a GPU has is asked of the driver
        encoded = _compiled(_encode, H100, {"x": "*bf16", "out": "*u8"}, {**encodes, "carried": None})
        decoded = _compiled(_decode, H100, {"buf": "*u8", "out": "*bf16"}, {**decodes, "ADDS": False})
        types = {"bufs": ("*u8",) * 4, "out": "*u8"}
        summed = _compiled(_decode_reduce_encode, H100, types, {**encodes, "out_fmt": fmt, "carried": None})
    kernels = zip((encoded, decoded, summed), most, tilings, (1, 1, 5), strict=True)
    for kernel, limit, tiling, num_messages in kernels:
        assert _instructions(kernel, tmp_path / "kernel") <= limit * tiling.rows * tiling.elems / 128
        assert kernel.asm["ptx"].count("global.b8") <= 2 * num_messages and kernel.metadata.shared <= 256


def test_decode_reduce_encode() -> None:
    from tightwire.kernels.cuda.block_quant import _decode_reduce_encode
    from tightwire.kernels.cuda.numbers import make_tiling

    fmt, out_fmt = parse_codec("int4-g32").format, parse_codec("int8").format
    assert fmt is not None and out_fmt is not None
    constants = {"fmt": fmt, "out_fmt": out_fmt, "carried": None, "tiling": make_tiling(1000, fmt, out_fmt)}
    _ptx(_decode_reduce_encode, H100, {"bufs": ("*u8", "*u8"), "out": "*u8"}, constants)


@pytest.mark.parametrize("name", ["int8-g64-sym-had", *(["int3-g64-sym-had"] if _AOT else ())])
def test_encoding_that_carries_what_it_loses(name: str) -> None:
    """Errors are rounded by one instruction, moved in whole vectors, and nothing is fused."""
    from tightwire.kernels.cuda.block_quant import _decode_reduce_encode, _encode
    from tightwire.kernels.cuda.numbers import make_tiling

    fmt = parse_codec(name).format
    assert fmt is not None
    constants = {"fmt": fmt, "tiling": make_tiling(1 << 20, fmt, encodes=True)}
    encoded = _ptx(_encode, H100, {"x": "*bf16", "out": "*u8", "carried": "*bf16"}, constants)
    types = {"bufs": ("*u8", "*u8"), "out": "*u8", "carried": "*bf16"}
    summed = _ptx(_decode_reduce_encode, H100, types, {**constants, "out_fmt": fmt})
    # Those of at most one round of rotations, and of two messages' codes and their products with the scale: all exact.
    numbers = constants["tiling"].rows * constants["tiling"].elems // 128
    assert encoded.count("fma") <= numbers and summed.count("fma") <= 4 * numbers
    for ptx in (encoded, summed):
        assert "ftz" not in ptx and "cvt.rn.bf16" in ptx
        assert "ld.global.v4" in ptx and "st.global.v4" in ptx


@pytest.mark.parametrize(
    ("codecs", "capability"),
    [
        (None, H100),
        (("none", "none"), A100),
        *([(("int4-g64-sym-had-ef", "int8-g64-had-ef"), A100), (("int4", "int8"), H100)] if _AOT else ()),
    ],
)
def test_all_reduce(codecs: tuple[str, str] | None, capability: int) -> None:
    """Arrivals are released to and acquired from the whole system, and no atomic operation goes to another GPU."""
    from tightwire.kernels.cuda.all_reduce_kernels import one_shot_kernel, two_shot_kernel
    from tightwire.kernels.cuda.numbers import make_tiling

    types: dict[str, Any] = {"x": "*bf16", "out": "*bf16", "headers": "*i64", "failure": "*i32"}
    if codecs is None:
        ptx, num_meetings = _ptx(one_shot_kernel, capability, types, {"WORLD": 2, "tiling": make_tiling(128)}), 1
    else:
        fmt, out_fmt = (parse_codec(name, feedback=True).format for name in codecs)
        tiling = make_tiling(128, *[given for given in (fmt, out_fmt) if given is not None])
        constants = {"WORLD": 2, "fmt": fmt, "out_fmt": out_fmt, "tiling": tiling}
        types |= {"cut": 4 * ("i32",), "sizes": 3 * ("i32",)}
        for name, codec in zip(("carried", "sums_carried"), codecs, strict=True):
            if codec.endswith("-ef"):
                types[name] = "*bf16"
            else:
                constants[name] = None
        ptx, num_meetings = _ptx(two_shot_kernel, capability, types, constants), 2
    atomics = [line for line in ptx.splitlines() if "atom." in line]
    assert len(atomics) == num_meetings and all("acq_rel" in line and "sys" in line for line in atomics)
    assert ptx.count("ld.global.sys.acquire") >= 2 * num_meetings
    assert ptx.count("st.release.sys.global.b32") == 2 * num_meetings  # one for each process: WORLD is 2
    assert "ld.global.nc" not in ptx  # what peers write is not constant


@pytest.mark.parametrize("adds", [False, True])
def test_norm(adds: bool) -> None:
    from tightwire.kernels.cuda.layer_ops import _rms_norm_row

    types: dict[str, Any] = dict.fromkeys(("x", "residual", "weight", "x_weight", "out", "total"), "*bf16")
    types |= {"form": 3 * ("fp32",), "strides": ("i32", "i32")}
    constants = {"PLACES": 4096, **({} if adds else {"residual": None, "x_weight": None})}
    ptx = _ptx(_rms_norm_row, H100, types, constants)
    assert "approx" not in ptx and "fma" not in ptx and "sqrt.rn" in ptx


ATTENTION_TYPES = {
    **dict.fromkeys(("query_start", "context_lens", "block_table", "arrivals"), "*i32"),
    **dict.fromkeys(("sums", "stats", "bias", "cos", "sin"), "*fp32"),
    "scale_log2": "fp32",
}
MERGING: dict[str, Any] = {"CHUNKS": (64, 256, 16, 64), "MERGED": (4, 16), "PARTIAL": True}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "per_kv_head", "cap_log2"),
    [
        (L40, torch.float16, 128, 8, 72.0),
        (H100, torch.bfloat16, 256, 8, 72.0),  # the least room in shared memory
        (L40, torch.float32, 64, 3, 0.0),
        *(
            (
                (A100, torch.bfloat16, 64, 3, 0.0),
                (H100, torch.bfloat16, 128, 4, 0.0),
                (L40, torch.bfloat16, 80, 1, 72.0),
                (H100, torch.float32, 128, 4, 72.0),
            )
            if _AOT
            else ()
        ),
    ],
)
def test_attention(capability: int, dtype: torch.dtype, head_dim: int, per_kv_head: int, cap_log2: float) -> None:
    """Both kernels load keys and values ahead, find room in shared memory, and multiply 16-bit numbers in matrix units."""
    from tightwire.kernels.cuda import attention_decode as decode
    from tightwire.kernels.cuda import attention_prefill as prefill
    from tightwire.kernels.cuda.attention_tiles import AttentionShape

    width = 1 << (head_dim - 1).bit_length()
    types = {**ATTENTION_TYPES, **dict.fromkeys(("q", "k_cache", "v_cache", "out"), TYPES[dtype])}
    sizes = 8 * per_kv_head, 8, per_kv_head, 0, head_dim, width, 16
    rows, keys, num_warps = prefill.tile_sizes(width, per_kv_head, dtype)
    shape = AttentionShape(*sizes, rows, keys, cap_log2, head_dim, 0)
    tile = _compiled(prefill._attend_tile, capability, types, {"shape": shape}, num_warps=num_warps)
    shape = AttentionShape(*sizes, 16, decode.keys_at_once(width, dtype), cap_log2, head_dim, 0)
    constants = {"shape": shape, **MERGING}
    chunks = _compiled(decode._attend_chunks, capability, types, constants, num_stages=decode.NUM_STAGES)
    for kernel, unit in ((tile, "wgmma" if capability == H100 else "mma.sync"), (chunks, "mma.sync")):
        assert kernel.metadata.shared <= SHARED_BYTES[capability]
        ptx = kernel.asm["ptx"]
        assert "cp.async.cg" in ptx
        assert (unit in ptx) == (dtype != torch.float32) and "tf32" not in ptx


@pytest.mark.parametrize(("capability", "turned"), [(L40, 64), *([(H100, 0), (H100, 64), (L40, 0)] if _AOT else ())])
def test_attention_of_int8_caches(capability: int, turned: int) -> None:
    """Codes become 16-bit numbers of the matrix units, which fit shared memory also with a bias of keys."""
    from tightwire.kernels.cuda import attention_decode as decode
    from tightwire.kernels.cuda import attention_prefill as prefill
    from tightwire.kernels.cuda.attention_tiles import AttentionShape

    types = {**ATTENTION_TYPES, **dict.fromkeys(("k_cache", "v_cache"), "*i8"), **dict.fromkeys(("q", "out"), "*bf16")}
    sizes, last = (32, 8, 4, 0, 128, 128, 16), (0.0, 130, turned)
    rows, keys, num_warps = prefill.tile_sizes(128, 4, torch.bfloat16)
    shape = AttentionShape(*sizes, rows, keys, *last)
    stages = (prefill.BIASED_STAGES, decode.BIASED_STAGES) if turned else (3, decode.NUM_STAGES)
    tile = _compiled(
        prefill._attend_tile, capability, types, {"shape": shape}, num_warps=num_warps, num_stages=stages[0]
    )
    keys = decode.keys_at_once(128, torch.bfloat16 if turned else torch.int8)
    constants = {"shape": AttentionShape(*sizes, 16, keys, *last), **MERGING}
    chunks = _compiled(decode._attend_chunks, capability, types, constants, num_stages=stages[1])
    for kernel in (tile, chunks):
        assert kernel.metadata.shared <= SHARED_BYTES[capability] and "mma" in kernel.asm["ptx"]


def test_attention_of_one_chunk_and_the_merge_of_several() -> None:
    """Whole vectors; the last program to arrive sees what others have written, and nothing of it is read before."""
    from tightwire.kernels.cuda.attention_decode import _attend_chunks
    from tightwire.kernels.cuda.attention_tiles import AttentionShape

    types = {**ATTENTION_TYPES, **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")}
    shape = AttentionShape(32, 8, 4, 0, 128, 128, page=16, rows=16, keys=32, cap_log2=0.0, stored=128, turned=0)
    alone = _ptx(_attend_chunks, A100, types, {"shape": shape, **MERGING, "PARTIAL": False})
    assert "st.global.v4" in alone and "atom." not in alone
    before, arrival, after = re.split(r"(atom\.\S+)", _ptx(_attend_chunks, H100, types, {"shape": shape, **MERGING}))
    assert arrival == "atom.global.gpu.acq_rel.add.u32"
    assert "st.global.v4" in before and "bar.sync" in before.rpartition("st.global")[2]
    assert "bar.sync" in after.partition("ld.global")[0] and after.count("ld.global.v4") == 16
    assert "ld.global.nc" not in before + after


@pytest.mark.parametrize(
    ("dtype", "normed"),
    [
        (torch.bfloat16, True),
        (torch.float32, False),
        *([(torch.bfloat16, False), (torch.float32, True)] if _AOT else ()),
    ],
)
def test_rotation_and_cache(dtype: torch.dtype, normed: bool) -> None:
    """Nothing is fused, or a sum would round once where the reference rounds twice; 16-bit numbers move in vectors."""
    from tightwire.kernels.cuda.layer_ops import Heads, _rotate_and_cache_heads

    number = TYPES[dtype]
    types = {"qkv": number, "q_out": number, "norms": (number, number, "fp32", "fp32"), "strides": 4 * ("i32",)}
    types |= {"rotation": ("*fp32", "*fp32", number, number, "*i32")}
    heads = Heads(32, 8, 64, 64, 16, 128, 8 * 16 * 128)
    constants = {"heads": heads, "AT_ONCE": 16, "PAIRS": 64, **({} if normed else {"norms": None})}
    ptx = _ptx(_rotate_and_cache_heads, H100, types, constants)
    assert "fma" not in ptx and "ftz" not in ptx
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx
    types |= {"rotation": ("*fp32", "*fp32", "*i8", "*i8", "*i32")}
    ptx = _ptx(
        _rotate_and_cache_heads,
        H100,
        types,
        constants | {"heads": replace(heads, stored=130, block_stride=8 * 16 * 130)},
    )
    assert "fma" not in ptx and "ftz" not in ptx and "div.rn" in ptx


@pytest.mark.parametrize("gelu", [False, True])
def test_swiglu(gelu: bool) -> None:
    from tightwire.kernels.cuda.layer_ops import _swiglu_part

    ptx = _ptx(_swiglu_part, A100, {"gate_up": "*bf16", "out": "*bf16"}, {"PLACES": 1024, "GELU": gelu})
    assert "div.full" not in ptx and "div.rn" in ptx
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx


def test_a_rows_norm_and_product_takes_few_instructions(tmp_path: Path) -> None:
    """Those that fit the time of its bytes are 14 a number; copies of weights are under way while others are multiplied."""
    from tightwire.kernels.cuda import linear_row

    types = {"rows": 3 * ("*bf16",), "norm": ("*bf16", "fp32", "fp32", "fp32"), "out": "*bf16"}
    types |= {"matrix": ("*bf16", "i32", "constexpr")}
    constants = {"rotation": None, "GELU": False, "heads": None, "OUTPUTS": 16}
    kernel = _compiled(linear_row._norm_product, H100, types, constants)
    assert _longest_loop(kernel, tmp_path / "kernel") <= 6.2 * 16 * linear_row._PLACES.value / 128
    ptx = kernel.asm["ptx"]
    assert "cp.async.cg" in ptx and "cp.async.wait_group" in ptx and "ld.global.v4" not in ptx
    assert ptx.count("fma.rn.f32") == 16 * linear_row._PLACES.value / 128


@pytest.mark.parametrize(
    ("name", "dtype", "capability"),
    [
        ("Q4_1", torch.float32, L40),
        ("Q5_1", torch.float16, L40),
        ("Q4_K", torch.bfloat16, H100),
        *(
            (
                ("Q8_0", torch.bfloat16, A100),
                ("Q4_1", torch.bfloat16, H100),
                ("Q2_K", torch.bfloat16, A100),
                ("Q3_K", torch.float16, L40),
                ("Q6_K", torch.float32, H100),
                ("IQ4_XS", torch.bfloat16, H100),
                ("MXFP4", torch.float16, A100),
            )
            if _AOT
            else ()
        ),
    ],
)
def test_packed_product(name: str, dtype: torch.dtype, capability: int) -> None:
    """Sixteen-bit numbers are multiplied in matrix units, float32 not, as they would round it; unpacked ones leave as vectors.

    Codes of rows by plane arrive sixteen bytes at once, ahead of their use; what is loaded otherwise are scales, an iteration ahead: as
    many before the loop as in it.
    """
    from tightwire.kernels.cuda.linear_packed import _packed_product, _unpack, launch_options
    from tightwire.kernels.cuda.packed_blocks import layout_of
    from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS

    packed, types = PACKED_FORMATS[name], {"blocks": "*u8", "halves": "*fp16", "out": TYPES[dtype], "row_bytes": "i64"}
    few = capability != H100  # programs; they have twice the warps, and the least shared memory
    ways = [(True, few), *([(False, few)] if name in ("Q4_K", "Q6_K") else ()), *([(True, not few)] if _AOT else ())]
    for by_plane, few_programs in ways:  # streamed layers are not by plane
        layout = layout_of(packed, by_plane, few_programs=few_programs and dtype != torch.float32)
        operands = types | dict.fromkeys(("x", "bias"), TYPES[dtype]) | {"row_bytes": "i32"}
        options = launch_options(layout, dtype)
        product = _compiled(_packed_product, capability, operands, {"LAYOUT": layout}, **options)
        assert product.metadata.shared <= SHARED_BYTES[L40]
        ptx, unpacked = product.asm["ptx"], _ptx(_unpack, capability, types, {"LAYOUT": layout})
        assert ("mma.sync" in ptx) == (dtype != torch.float32) and "tf32" not in ptx
        assert "st.global.v4" in unpacked and "fma.rn" not in unpacked
        if by_plane:
            assert "ld.global.v4" in unpacked
        if by_plane and dtype != torch.float32:
            num_planes = layout.num_phases + (packed.codes.high_bits > 0)
            before, loop = _around_loop(ptx)
            assert loop.count("cp.async.cg") >= num_planes + 1 and "ld.global.v4" not in ptx
            ahead = before.count("ld.global")
            assert 0 < ahead == loop.count("ld.global") - 2 * (packed.codes.fifths_at > 0)


def _around_loop(ptx: str) -> tuple[str, str]:
    """What is before a kernel's loop, and the loop: between a label and the last branch back to it."""
    labels = [(match[1], match.start()) for match in re.finditer(r"^(\$L__BB\w+):", ptx, re.MULTILINE)]
    back = {start: ptx.rfind(f"bra \t{name};") for name, start in labels}
    start = max(back, key=lambda start: back[start] - start)
    assert back[start] > start, "no loop"
    return ptx[:start], ptx[start : back[start]]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *[("Q4_1", 7.2), ("Q4_K", 6.8)],
        *([("Q4_0", 5.9), ("Q8_0", 8.1), ("Q2_K", 8.3), ("Q3_K", 7.1), ("Q5_K", 9.2), ("Q6_K", 6.9)] if _AOT else ()),
    ],
)
def test_packed_products_take_few_instructions(name: str, most: float, tmp_path: Path) -> None:
    """In the loop, for each of a thread's numbers of the weights."""
    from tightwire.kernels.cuda.linear_packed import _OUTPUTS, _packed_product, launch_options
    from tightwire.kernels.cuda.packed_blocks import layout_of
    from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS

    layout = layout_of(PACKED_FORMATS[name], by_plane=True)
    types = {"blocks": "*u8", "halves": "*fp16", "row_bytes": "i32"} | dict.fromkeys(("x", "out"), "*bf16")
    options = launch_options(layout, torch.bfloat16)
    product = _compiled(_packed_product, H100, types, {"LAYOUT": layout, "bias": None}, **options)
    numbers = _OUTPUTS.value * layout.piece_elems / 32
    assert _longest_loop(product, tmp_path / "kernel") <= most * numbers


@pytest.mark.parametrize(("number", "capability"), [("bf16", H100), *([("fp32", A100), ("fp16", L40)] if _AOT else ())])
def test_adapters(number: str, capability: int) -> None:
    from tightwire.kernels.cuda.lora import _expand, _shrink

    pointers = {"entries": "*i32", "ranks": "*i32", "shrunk": "*fp32", "entry_stride": "i64"}
    _ptx(_shrink, capability, {**pointers, "x": f"*{number}", "a": f"*{number}"}, {"NUM_PARTS": 3})
    pointers["b"] = f"*{number}"
    _ptx(_expand, capability, {**pointers, "out": "*fp32", "part_stops": ("i32",) * 3}, {})
    _ptx(_expand, capability, {**pointers, "out": f"*{number}", "part_stops": ("i32",) * 2}, {})
