"""The Triton kernels compile for GPUs that are not here: what only the interpreter accepts is found out without one.

And what they compile to keeps two promises: nothing flushes denormals or fuses a multiplication with an addition where an
encoder's bits depend on it, and 16-bit numbers are loaded in whole vectors.
"""

from pathlib import Path
from typing import Any

import pytest
from interpreted import needs_triton

from tightwire.comm.codec import parse_codec

pytestmark = needs_triton

A100, H100 = 80, 90


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _ptx(kernel: Any, capability: int, types: dict[str, Any], constants: dict[str, Any]) -> str:
    """What ``kernel`` compiles to, given the types of its other arguments; pointers and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "i32") if name not in constants else "constexpr" for name in names}
    aligned = [(i,) for i, name in enumerate(names) if str(signature[name]).startswith(("*", "i"))]
    aligned += [
        (i, j) for i, name in enumerate(names) if isinstance(signature[name], tuple) for j in range(len(types[name]))
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={path: [["tt.divisibility", 16]] for path in aligned},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def _sizes(plan: Any, num_elems: int) -> dict[str, int]:
    return dict(zip(("ROWS", "ELEMS", "TILES", "BEYOND"), plan.sizes(num_elems), strict=True))


@pytest.mark.parametrize(("name", "capability"), [("int8", H100), ("int5-had", A100), ("int3-sr", H100), ("fp8", A100)])
def test_encode_and_decode(name: str, capability: int) -> None:
    from tightwire.kernels.block_quant_triton import TilePlan, _decode, _encode

    fmt = parse_codec(name).format
    assert fmt is not None
    constants = {"fmt": fmt, **_sizes(TilePlan(fmt), 1 << 20)}
    encoded = _ptx(_encode, capability, {"x": "*bf16", "out": "*u8"}, constants)
    decoded = _ptx(_decode, capability, {"buf": "*u8", "out": "*bf16"}, {**constants, "ADD": False})
    for ptx in (encoded, decoded):
        assert "ftz" not in ptx and "fma" not in ptx and "div.full" not in ptx
    assert "ld.global.v4" in encoded and "st.global.v4" in decoded


def test_decode_reduce_encode() -> None:
    from tightwire.kernels.block_quant_triton import TilePlan, _decode_reduce_encode

    fmt, out_fmt = parse_codec("int4-g32").format, parse_codec("int8").format
    assert fmt is not None and out_fmt is not None
    constants = {"fmt": fmt, "out_fmt": out_fmt, **_sizes(TilePlan(fmt, out_fmt), 1000)}
    _ptx(_decode_reduce_encode, H100, {"bufs": ("*u8", "*u8"), "out": "*u8"}, constants)


@pytest.mark.parametrize(("codecs", "capability"), [(None, H100), (("none", "none"), A100), (("int4", "int8"), H100)])
def test_all_reduce(codecs: tuple[str, str] | None, capability: int) -> None:
    """Arrivals are acquired from the whole system, and no atomic operation goes to another GPU."""
    from tightwire.kernels.all_reduce_kernels import one_shot_kernel, two_shot_kernel
    from tightwire.kernels.block_quant_triton import TilePlan

    types = {"x": "*bf16", "out": "*bf16", "headers": "*i64", "failure": "*i32"}
    if codecs is None:
        ptx, num_meetings = _ptx(one_shot_kernel, capability, types, {"WORLD": 2, **_sizes(TilePlan(), 128)}), 1
    else:
        fmt, out_fmt = (parse_codec(name).format for name in codecs)
        plan = TilePlan(*[given for given in (fmt, out_fmt) if given is not None])
        constants = {"WORLD": 2, "fmt": fmt, "out_fmt": out_fmt, **_sizes(plan, 128)}
        ptx, num_meetings = _ptx(two_shot_kernel, capability, types, constants), 2
    atomics = [line for line in ptx.splitlines() if "atom." in line]
    assert len(atomics) == num_meetings and all("acq_rel" in line and "sys" in line for line in atomics)
    assert ptx.count("ld.global.sys.acquire") >= 2 * num_meetings
    assert "ld.global.nc" not in ptx  # what peers write is not constant


@pytest.mark.parametrize("adds", [False, True])
def test_norm(adds: bool) -> None:
    from tightwire.kernels.norm_triton import _rms_norm_row

    types = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16")
    ptx = _ptx(_rms_norm_row, H100, {**types, "eps": "fp32"}, {"ADDS": adds, "PLACES": 4096})
    assert "approx" not in ptx and "fma" not in ptx and "sqrt.rn" in ptx


@pytest.mark.parametrize(("name", "dtype"), [("Q8_0", "bf16"), ("Q4_0", "fp16"), ("Q4_1", "bf16"), ("Q4_1", "fp32")])
def test_packed_product(name: str, dtype: str) -> None:
    from tightwire.kernels.linear_packed_triton import _packed_product
    from tightwire.kernels.packed_format import PACKED_FORMATS

    types = {**dict.fromkeys(("x", "bias", "out"), f"*{dtype}"), "blocks": "*u8", "halves": "*fp16"}
    ptx = _ptx(_packed_product, A100, types, {"PACKED": PACKED_FORMATS[name], "BIASED": True})
    assert ("mma.sync" in ptx) == (dtype != "fp32")  # matrix units, where they would not round the numbers
