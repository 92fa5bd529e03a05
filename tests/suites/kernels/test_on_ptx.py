"""What Triton compiles the kernels to, run on this CPU (``helpers/ptx``): it passes the checks that the interpreter passes.

The interpreter knows neither layouts of registers nor asynchronous copies, barriers and matrix units. `make aot` runs all, `make test` the
quick ones.
"""

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Ranks, load_function
from helpers.kernels.compiled import compiled
from helpers.kernels.libcuda import needs_launchers
from helpers.ptx.kernel import PtxKernel
from helpers.ptx.memory import PtxError
from helpers.ptx.numbers import from_bits, fused, to_bits

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS

A100, H100 = 80, 90
_ALL = "TIGHTWIRE_AOT" in os.environ
_CHECKED = Path(__file__).parents[2] / "kernels/cuda"
_QUICK: list[Any] = [
    ("layer_ops", "_check_norm", H100),
    ("linear_row", "_check", H100, [(6, 1100)]),
    ("linear_row", "_check_rotated", H100, [torch.bfloat16], [(3, 2, 10, 3)]),
    ("attention", "_check_interleaved", H100),
    ("linear_packed", "_check", H100, ["Q4_0"]),
]
_MORE: list[Any] = [
    ("layer_ops", "_check_swiglu", H100),
    ("linear_row", "_check", A100, [(20, 576), (30, 40), (4102, 40)]),
    ("linear_row", "_check_rotated", A100, [torch.bfloat16], [(5, 1, 8, 4), (60, 2, 64, 32)]),
    ("block_quant", "_check_sizes", H100),
    ("block_quant", "_check_hard_numbers", A100),
    ("block_quant", "_check_decode_add", H100),
    *(("linear_packed", "_check", A100, [name]) for name in PACKED_FORMATS),
    ("linear_packed", "_check_unpacked", A100),
    ("lora", "_check", H100),
    *(("attention", f"_check_{name}", A100) for name in ("chunks", "interleaved", "mixed", "windows_and_caps")),
    *(("attention", f"_check_{name}", H100) for name in ("chunks", "mixed", "parts_of_groups", "8_bits")),
]
_SUMS = [("one-shot", 1100, torch.bfloat16), ("two-shot", 1001, torch.bfloat16), ("flash-int4", 1001, torch.bfloat16)]
_MORE_SUMS = [("flash-int8-plain", 5003, torch.bfloat16), ("flash:int4-had,int8-g32-ef", 700, torch.bfloat16)]
_HEAD = """
.visible .entry swap(
	.param .u64 swap_param_0,
	.param .u64 swap_param_1
)
.reqntid 64
{
	.reg .b32 %r<4>;
"""
_SWAP = """
	ld.param.b64 %rd1, [swap_param_0];
	mov.u32 %r1, %tid.x;
	mad.wide.u32 %rd2, %r1, 4, %rd1;
	shl.b32 %r2, %r1, 2;
	COPY
	xor.b32 %r2, %r2, 252;
	ld.shared.b32 %r3, [ %r2 + 0 ];
	ld.param.b64 %rd3, [swap_param_1];
	mad.wide.u32 %rd4, %r1, 4, %rd3;
	st.global.b32 [ %rd4 + 0 ], { %r3 };
	ret;
$L__func_end0:
}
"""
_COPY = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 4; cp.async.commit_group;"


@needs_launchers
@pytest.mark.parametrize("case", _QUICK + _MORE * _ALL, ids=lambda case: " ".join(map(str, case[:3])))
def test_a_check_of_the_interpreter(case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, check, capability, *args = case
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiled(capability, runs=True) as found:
        path = _CHECKED / f"test_{module}.py"
        assert not load_function(f"{module}_on_ptx", str(path), check)(None, *args)
    assert found, "nothing was compiled"
    if module == "attention":
        unit = "wgmma.mma_async" if capability == H100 and check != "_check_interleaved" else "mma.sync"
        assert any(unit in kernel.ptx for kernel in found)


def _without_barrier(ptx: str) -> str:
    """Without those between the last store of sums and the count of an arrival."""
    before, store, rest = ptx.partition("atom.global")[0].rpartition("st.global")
    return before + store + re.sub(r"bar\.sync[^;]*;", "", rest) + ptx[len(before + store + rest) :]


def _without_reset(ptx: str) -> str:
    """Without the zero for the next launch."""
    before, count, after = ptx.partition("atom.global")
    return before + count + re.sub(r"@%p\d+ st\.global\.b32 [^;]*;", "", after, count=1)


@needs_launchers
@pytest.mark.parametrize(  # a process keeps what it compiled for a capability
    ("capability", "without"), [(86, _without_reset), *([(89, _without_barrier)] if _ALL else [])]
)
def test_what_the_last_program_of_a_row_needs(
    capability: int, without: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without is _without_barrier and not version("triton").startswith("3.7"):
        pytest.skip(
            "a missing barrier shows in some orders: the drawn ones have one of those in what Triton 3.7 compiles"
        )

    def changed(ptx: str, shared_bytes: int) -> PtxKernel:
        assert without(ptx) != ptx
        return PtxKernel(without(ptx), shared_bytes)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("helpers.kernels.compiled.PtxKernel", changed)
    check = load_function("attention_on_ptx", str(_CHECKED / "test_attention.py"), "_check_interleaved")
    with compiled(capability, runs=True), pytest.raises(AssertionError, match="merged"):
        check(None)


def _check_sums(group: Group, path: str, cache: str, cases: list[Any]) -> None:
    os.environ["TRITON_CACHE_DIR"] = f"{cache}/{group.rank}"
    file = _CHECKED.parents[1] / "comm/transport/test_peer_memory.py"
    with compiled(H100, runs=True):
        load_function("peer_memory_on_ptx", str(file), "_check_sums")(group, path, cases)


@needs_launchers
@pytest.mark.alone
def test_sums_of_two_processes(tmp_path: Path) -> None:
    """Kernels of both run at the same time, on memory that both map, and wait for each other at their barriers."""
    file = _CHECKED.parents[1] / "comm/transport/test_peer_memory.py"
    shared_file = load_function("peer_memory_on_ptx", str(file), "_shared_file")
    ranks = Ranks(2)
    with shared_file(2) as path:
        ranks.run(_check_sums, path, str(tmp_path), _SUMS + _MORE_SUMS * _ALL, timeout_s=300.0)
    ranks.close()


@pytest.mark.parametrize(
    ("copying", "is_right"),
    [
        (f"{_COPY} cp.async.wait_group 0; bar.sync 0;", True),
        (f"{_COPY} cp.async.wait_group 1; bar.sync 0;", False),
        (f"{_COPY} bar.sync 0;", False),
        (f"{_COPY} cp.async.wait_group 0;", False),  # one of the two warps is first
    ],
)
def test_a_copy_is_there_when_it_was_waited_for_by_all(copying: str, is_right: bool) -> None:
    kernel = PtxKernel(_HEAD + _SWAP.replace("COPY", copying), shared_bytes=256)
    given, swapped = torch.arange(64, dtype=torch.int32), torch.full((8, 64), -1, dtype=torch.int32)
    for seed, found in enumerate(swapped):
        kernel(1, [given, found], seed=seed)
    assert bool((swapped == given.flip(0)).all()) == is_right


def test_what_a_gpu_would_not_do_is_an_error() -> None:
    kernel = PtxKernel(_HEAD + _SWAP.replace("COPY", f"{_COPY} cp.async.wait_group 0; bar.sync 0;"), shared_bytes=256)
    given = torch.arange(64, dtype=torch.int32)
    with pytest.raises(PtxError, match="outside of all tensors"):
        kernel(1, [given, torch.zeros(63, dtype=torch.int32)])
    with pytest.raises(PtxError, match="not a multiple"):
        kernel(1, [given, torch.zeros(129, dtype=torch.int16)[1:]])
    half = _SWAP.replace("COPY", "setp.lt.s32 %p1, %r1, 7; @%p1 bra $L__BB0_1; $L__BB0_1:\n")
    with pytest.raises(PtxError, match="part ways"):
        PtxKernel(_HEAD + half, shared_bytes=256)(1, [given, given.clone()])
    with pytest.raises(PtxError, match="vote.sync is not here"):
        PtxKernel(_HEAD + _SWAP.replace("COPY", "vote.sync %p1, %p2;"), shared_bytes=256)(1, [given, given.clone()])


def test_a_fused_product_is_rounded_once() -> None:
    near, few, sixteenths, fewer = (np.array([x], np.float32) for x in (1 + 2.0**-12, 2.0**-70, 1.0625, 2.0**-40))
    assert from_bits(to_bits(fused(near, near, few), "f32"), "f32") == 1 + 2.0**-11 + 2.0**-23
    assert from_bits(to_bits(fused(sixteenths, sixteenths, fewer), "bf16"), "bf16") == 1.1328125


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    """Of bfloat16, and whole numbers of each size."""
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bits = to_bits(numbers.numpy(), "bf16")
    assert np.array_equal(from_bits(bits, "bf16"), numbers.bfloat16().float().numpy())
    for kind, dtype in (("s8", torch.int8), ("s16", torch.int16), ("s32", torch.int32), ("u8", torch.uint8)):
        whole = (1000 * numbers).long()
        assert np.array_equal(from_bits(whole.numpy().view(np.uint64), kind), whole.to(dtype).numpy())
