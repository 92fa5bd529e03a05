"""The CPU attention: within float32 rounding of the truth, and the same bits whatever runs beside a sequence."""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.paged_batch import attend

from tightwire.kernels.cpu.attention import ROWS
from tightwire.kernels.cpu.library import has_pairs

MIXED = {"query_lens": (5, 1, 17, 1, 130), "context_lens": (40, 64, 33, 1, 130)}


def _assert_close(batch: Any) -> None:
    batch.check(attend(*batch.arguments()), rounds_weights=batch.dtype == torch.bfloat16 and has_pairs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 80, 100, 7])
def test_within_rounding_of_float64(dtype: torch.dtype, head_dim: int, paged_batch: Callable[..., Any]) -> None:
    _assert_close(paged_batch(**MIXED, dtype=dtype, head_dim=head_dim))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 2), (7, 1), (32, 8), (ROWS + 7, 1), (2 * ROWS + 2, 2)]
)
def test_any_grouping_of_heads(num_heads: int, num_kv_heads: int, paged_batch: Callable[..., Any]) -> None:
    _assert_close(paged_batch(**MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "stop"), [(0, 5), (5, 9), (1, 2), (2, 8), (7, 9), (4, 7)])
def test_heads_that_begin_and_end_inside_a_group(
    first: int, stop: int, dtype: torch.dtype, paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch(**MIXED, dtype=dtype)
    arguments, groups = batch.part(first, stop)
    assert torch.equal(attend(*arguments, groups=groups), attend(*batch.arguments())[:, first:stop])


@pytest.mark.parametrize("tokens_per_block", [1, 8, 16, 24, 32, 256])
def test_any_block_size_gives_the_same_bits(tokens_per_block: int, paged_batch: Callable[..., Any]) -> None:
    want = attend(*paged_batch(**MIXED, tokens_per_block=16).arguments())
    got = attend(*paged_batch(**MIXED, tokens_per_block=tokens_per_block, seed=0).arguments())
    assert torch.equal(got, want)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 2000])
def test_any_context_length(length: int, paged_batch: Callable[..., Any]) -> None:
    _assert_close(paged_batch(query_lens=(1,), context_lens=(length,)))
    _assert_close(paged_batch(query_lens=(min(length, 70),), context_lens=(length,), dtype=torch.bfloat16))


def test_scores_far_apart(paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch(**MIXED)
    batch.q_rows = [q * 300 for q in batch.q_rows]  # weights from 1 down to 2^-1000s
    _assert_close(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 0.0])
def test_unwritten_slots_change_no_result(dtype: torch.dtype, garbage: float, paged_batch: Callable[..., Any]) -> None:
    got = attend(*paged_batch(**MIXED, dtype=dtype, garbage=garbage).arguments())
    want = attend(*paged_batch(**MIXED, dtype=dtype, garbage=1.0).arguments())
    assert torch.equal(got, want)


def test_queries_may_be_a_view(paged_batch: Callable[..., Any]) -> None:
    q, *rest = paged_batch(**MIXED).arguments()
    wide = torch.randn(q.shape[0], q.shape[1] + 6, q.shape[2])
    wide[:, : q.shape[1]] = q
    assert torch.equal(attend(wide[:, : q.shape[1]], *rest), attend(q, *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (4, 2)])
def test_neighbours_change_no_bit(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, paged_batch: Callable[..., Any]
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "dtype": dtype}
    together = attend(*paged_batch(**MIXED, **shape).arguments())
    first = 0
    for query_len, context_len in zip(*MIXED.values(), strict=True):
        alone = paged_batch(query_lens=(query_len,), context_lens=(context_len,), seed=0, **shape)
        assert torch.equal(attend(*alone.arguments()), together[first : first + query_len])
        first += query_len


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_prompt_with_a_window_change_no_bit(dtype: torch.dtype, paged_batch: Callable[..., Any]) -> None:
    """Tiles begin at other keys, and rows see nothing of their first ones."""
    form = {"window": 50, "cap": 3.0}
    whole = attend(*paged_batch(query_lens=(200,), context_lens=(200,), dtype=dtype).arguments(), **form)
    for first, count in ((60, 1), (63, 2), (100, 100), (199, 1)):
        batch = paged_batch(query_lens=(200,), context_lens=(200,), dtype=dtype)
        q, k_cache, v_cache, _, _, table, scale = batch.arguments()
        start, lens = torch.tensor([0, count]).int(), torch.tensor([first + count]).int()
        got = attend(q[first : first + count], k_cache, v_cache, start, lens, table, scale, **form)
        assert torch.equal(got, whole[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (3, 3), (2, 1), (5, 1)])
@pytest.mark.parametrize("chunks", [(1,) * 200, (7,) * 28 + (4,), (64, 64, 64, 8), (199, 1), (1, 199)])
def test_chunks_of_a_prompt_change_no_bit(
    chunks: tuple[int, ...], dtype: torch.dtype, num_heads: int, num_kv_heads: int, paged_batch: Callable[..., Any]
) -> None:
    batch = paged_batch(
        query_lens=(200,), context_lens=(200,), dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    q, k_cache, v_cache, _, _, table, scale = arguments = batch.arguments()
    whole = attend(*arguments)
    done = 0
    for chunk in chunks:
        start = torch.tensor([0, chunk], dtype=torch.int32)
        context = torch.tensor([done + chunk], dtype=torch.int32)
        part = attend(q[done : done + chunk], k_cache, v_cache, start, context, table, scale)
        assert torch.equal(part, whole[done : done + chunk])
        done += chunk
    assert done == 200


def test_the_number_of_threads_changes_no_bit(
    num_threads: Callable[[int], None], paged_batch: Callable[..., Any]
) -> None:
    arguments = paged_batch(query_lens=(300, 1, 1), context_lens=(300, 700, 5)).arguments()
    num_threads(1)
    want = attend(*arguments)
    num_threads(3)
    for _ in range(4):
        assert torch.equal(attend(*arguments), want)


def test_four_threads_may_call_at_once(num_threads: Callable[[int], None], paged_batch: Callable[..., Any]) -> None:
    num_threads(2)
    batches = [paged_batch(query_lens=(150, 1), context_lens=(150, 300 + i), seed=i).arguments() for i in range(4)]
    want = [attend(*arguments) for arguments in batches]
    with ThreadPoolExecutor(max_workers=4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda arguments: attend(*arguments), batches, timeout=240))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(os.environ.get("TIGHTWIRE_KERNELS") == "sanitize", reason="the sanitizer keeps freed memory")
def test_threads_that_end_free_their_scratch_memory(
    num_threads: Callable[[int], None], paged_batch: Callable[..., Any]
) -> None:
    num_threads(1)
    arguments = paged_batch(query_lens=(100,), context_lens=(100,)).arguments()

    def run_threads(count: int) -> int:
        for _ in range(count):
            with ThreadPoolExecutor(max_workers=1) as pool:
                pool.submit(attend, *arguments).result()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = run_threads(50)
    assert run_threads(250) < before + (8 << 20)  # some 150 KB a thread, 35 MB together, if they were kept
