"""A KV cache on the host: its budget adds up, what does not fit is refused with what would, and a server runs on it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.server.local_engine import greedy_text
from helpers.server.server_process import ServerProcess, complete, get
from tiny import make_tiny

from tightwire.model.checkpoint.header import RANDOM_SHAPES
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.server.config.flags import make_config
from tightwire.server.config.limits import Limits
from tightwire.server.plan.memory_budget import MemoryBudget, NotEnoughMemoryError, describe_offload, make_budget
from tightwire.server.plan.rank_bytes import MemoryInputs, Pool
from tightwire.sizes import parse_bytes

GIB = 1 << 30
MODEL = RANDOM_SHAPES["llama-3.2-1b"]  # 16 layers, 2.3 GiB in bfloat16, 512 KiB for 16 tokens in the cache


def offloaded(gib: float, tp: int = 1, device: str = "cuda", host_gib: float = 8, **options: Any) -> MemoryBudget:
    """``gib``: of each device, or of the host where that is the device."""
    return make_budget(inputs(gib, tp, device, host_gib, kv_offload=True, **options))


def on_device(gib: float, tp: int = 1) -> MemoryBudget:
    return make_budget(inputs(gib, tp))


def inputs(gib: float, tp: int = 1, device: str = "cuda", host_gib: float = 8, **options: Any) -> MemoryInputs:
    available = int(gib * GIB)
    pools = [Pool(name="host memory", available_bytes=available, ranks=range(tp))]
    if device == "cuda":
        pools = [Pool(name=f"cuda:{r}", available_bytes=available, ranks=range(r, r + 1)) for r in range(tp)]
    return MemoryInputs(
        model=MODEL,
        layout=make_layout(MODEL, tp),
        options=make_config(options).engine,
        pools=pools,
        dtype="bfloat16",
        formats=WeightFormats(),
        device=device,
        host_bytes=int(host_gib * GIB),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_with_a_gpu_the_host_has_the_cache_and_each_device_two_buffers(tp: int) -> None:
    made = offloaded(4, tp)
    assert made.host is not None and made.buffer_blocks is not None
    assert sum(rank.block for rank in made.ranks) * made.num_blocks <= 8 * GIB
    for rank in made.ranks:
        assert rank.buffer * 16 == rank.block * 2  # two layers of sixteen
        assert rank.fixed + rank.buffer * made.buffer_blocks <= 4 * GIB
        assert made.cache_bytes(rank) == rank.buffer * made.buffer_blocks
    assert made.num_blocks > 1.5 * on_device(4, tp).num_blocks
    assert made.max_model_len <= made.buffer_blocks * 16
    assert "host memory, for the KV cache: " in made.table()


def test_a_buffer_has_no_more_blocks_than_there_are() -> None:
    made = offloaded(24, max_num_seqs=2, max_model_len=1024)
    assert made.num_blocks == made.buffer_blocks == made.step_blocks == 2 * 1024 // 16


@pytest.mark.parametrize("tp", [1, 2])
def test_on_a_cpu_cache_and_buffers_share_the_memory(tp: int) -> None:
    made = offloaded(6, tp, "cpu")
    assert made.host is None and made.buffer_blocks is not None
    need = sum(rank.fixed + rank.block * made.num_blocks + rank.buffer * made.buffer_blocks for rank in made.ranks)
    assert need == sum(rank.fixed + made.cache_bytes(rank) for rank in made.ranks) <= 6 * GIB
    assert made.max_model_len <= made.buffer_blocks * 16


@pytest.mark.parametrize(
    ("options", "why", "fix"),
    [
        ({"max_model_len": 131_072}, "a buffer holds \\d+ tokens, less than", r"--(max-model-len) (\d+) fits"),
        ({"kv_cache_memory": 9 * GIB}, "the KV cache does not fit in host memory", r"--(kv-cache-memory) (\w+) fits"),
        ({"kv_cache_memory": 4 << 20, "max_model_len": 1000}, "holds 128 tokens", r"--(kv-cache-memory) (\w+), or"),
        ({"max_model_len": 4096, "host_gib": 0.1}, "does not fit in host memory", r"--(max-model-len) (\d+) fits"),
    ],
)
def test_what_does_not_add_up_is_refused_with_what_would(options: dict[str, Any], why: str, fix: str) -> None:
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
    with pytest.raises(NotEnoughMemoryError, match=why) as error:
        offloaded(3.8, **small, **options)
    assert "host memory, for the KV cache: " in str(error.value)
    found = re.search(fix, str(error.value))
    assert found, str(error.value)
    mended: dict[str, Any] = options | {found[1].replace("-", "_"): parse_bytes(found[2])}
    offloaded(3.8, **small, **mended)


def test_a_host_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(NotEnoughMemoryError, match="does not fit in host memory; free some of it"):
        offloaded(4, host_gib=0)


def test_weights_that_leave_no_room_for_buffers_are_refused() -> None:
    with pytest.raises(NotEnoughMemoryError, match="the weights do not fit"):
        offloaded(2)


def test_a_step_that_cannot_hold_the_longest_sequence_is_refused() -> None:
    sizes: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "num_blocks": 64,
        "block_size": 4,
    }
    assert Limits(**sizes, max_step_blocks=16).max_step_blocks == 16
    with pytest.raises(ValueError, match=r"15 blocks of 4 = 60 tokens.*set --max-model-len to at most 60"):
        Limits(**sizes, max_step_blocks=15)


def test_the_plan_says_what_lies_where_and_what_a_step_moves() -> None:
    options: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_memory": GIB}
    given = inputs(4, kv_offload=True, **options)
    made = replace(offloaded(4, **options), buffer_blocks=512)
    lines = "\n".join(describe_offload(made, given))
    assert "KV cache: 32768 tokens on the host; two buffers, each for 512 blocks (8192 tokens) of a layer" in lines
    # Of 8 sequences 64 blocks each to the device, and one back, of 512 KiB.
    assert f"each after 1024, moves {8 * 65 / 2:g}MiB a rank" in lines
    assert "no CUDA graphs" in lines and "warning" not in lines
    no_graphs = replace(given, options=replace(given.options, cuda_graphs=False))
    assert "no CUDA graphs" not in "\n".join(describe_offload(made, no_graphs))
    on_cpu = "\n".join(describe_offload(made, replace(given, device="cpu")))
    assert "warning: on a CPU, host and device are one memory" in on_cpu
    assert describe_offload(on_device(24), inputs(24)) == ()


def test_a_server_answers_as_without_and_says_what_it_moves(tmp_path: Path) -> None:
    """With keys and values in 8 bits, as with those of other types in ``tests/model/cache/test_kv_cache.py``."""
    model = make_tiny(tmp_path / "tiny", attention_bias=True)
    options = ("--port", "0", "--max-num-seqs", "4", "--dtype", "float32", "--max-model-len", "128", "--tp", "2")
    options += ("--kv-offload", "--kv-cache-dtype", "int8")
    with ServerProcess(tmp_path / "offloaded", str(model), *options) as server:
        url = server.wait_ready()
        text = complete(url, 40).json()["choices"][0]["text"]
        log, metrics = server.log, get(f"{url}/metrics").text
        assert server.end() == 0
    assert text == greedy_text(model, "hello", 40, tp=2, kv_dtype=torch.int8) and len(text) > 20
    assert "int8 KV cache" in log and "two buffers, each for 32 blocks (512 tokens) of a layer" in log
    assert "warning: on a CPU, host and device are one memory" in log
    moved = re.search(r"^tightwire_kv_offload_bytes_total (\S+)", metrics, re.MULTILINE)
    assert moved and float(moved[1]) > 0
    assert re.search(r"^tightwire_kv_offload_wait_seconds_total \S+", metrics, re.MULTILINE)
