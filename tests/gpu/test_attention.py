"""Attention on a GPU: within rounding of float64, the same bits whatever runs beside a row, and in a captured graph."""

from typing import Any

import pytest
import torch
from helpers.model.paged_batch import PagedBatch, attend
from torch import Tensor

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.spec.attention import AttentionForm, HeadGroups, PackedSequences

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Generated rows first, one sequence of them computed again; then prompts, with and without cached tokens.
MIXED: dict[str, Any] = {"query_lens": (1, 1, 3, 1, 300, 1, 77), "context_lens": (3000, 64, 530, 1, 300, 33, 900)}
NUM_DECODE = 6
LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def _attend(arguments: tuple[Any, ...], num_decode_rows: int = 0, groups: HeadGroups | None = None) -> Tensor:
    *tensors, scale = arguments
    on_device = [tensor.cuda() for tensor in tensors]
    return attend(*on_device, scale, num_decode_rows=num_decode_rows, groups=groups).cpu()  # pyright: ignore[reportCallIssue]


def _assert_close(batch: PagedBatch, num_decode_rows: int) -> None:
    batch.check(_attend(batch.arguments(), num_decode_rows), rounds_weights=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_within_rounding_of_float64(dtype: torch.dtype, head_dim: int) -> None:
    for num_decode_rows in (0, NUM_DECODE, sum(MIXED["query_lens"])):
        _assert_close(PagedBatch(**MIXED, dtype=dtype, head_dim=head_dim), num_decode_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "stop"), [(0, 5), (5, 9), (4, 7)])
def test_heads_that_begin_and_end_inside_a_group(first: int, stop: int, dtype: torch.dtype) -> None:
    batch = PagedBatch(**MIXED, dtype=dtype)
    arguments, groups = batch.part(first, stop)
    whole = _attend(batch.arguments(), NUM_DECODE)
    assert torch.equal(_attend(arguments, NUM_DECODE, groups), whole[:, first:stop])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (8, 1), (32, 8), (20, 1), (128, 1)])
@pytest.mark.parametrize("tokens_per_block", [8, 16, 32, 24])
def test_any_grouping_of_heads_and_block_size(num_heads: int, num_kv_heads: int, tokens_per_block: int) -> None:
    _assert_close(
        PagedBatch(
            **MIXED,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            tokens_per_block=tokens_per_block,
            dtype=torch.bfloat16,
        ),
        NUM_DECODE,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    together = _attend(PagedBatch(**MIXED, **LLAMA, dtype=dtype).arguments(), NUM_DECODE)
    first = 0
    for query_len, context_len in zip(*MIXED.values(), strict=True):
        alone = PagedBatch(query_lens=(query_len,), context_lens=(context_len,), **LLAMA, dtype=dtype).arguments()
        got = _attend(alone, query_len if first < NUM_DECODE else 0)
        assert torch.equal(got, together[first : first + query_len]), f"sequence from row {first}"
        first += query_len


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [(1,) * 200, (7,) * 28 + (4,), (64, 64, 64, 8), (199, 1), (1, 199)])
@pytest.mark.parametrize("generated", [False, True])
def test_chunks_change_no_bit(chunks: tuple[int, ...], dtype: torch.dtype, generated: bool) -> None:
    length = 500
    batch = PagedBatch(query_lens=(length,), context_lens=(length,), **LLAMA, dtype=dtype)
    q, k_cache, v_cache, start, lens, table, scale = batch.arguments()
    whole = _attend((q, k_cache, v_cache, start, lens, table, scale), length * generated)
    done = length - 200
    for chunk in chunks:
        start = torch.tensor([0, chunk], dtype=torch.int32)
        lens = torch.tensor([done + chunk], dtype=torch.int32)
        rows = q[done : done + chunk]
        part = _attend((rows, k_cache, v_cache, start, lens, table, scale), chunk * generated)
        assert torch.equal(part, whole[done : done + chunk]), f"{chunk} rows from {done}"
        done += chunk


def test_a_captured_step_of_generated_rows(device: torch.device) -> None:
    """One graph for eight sequences and any lengths up to the table's, replayed for fewer: what is missing is padding."""
    batch = PagedBatch(query_lens=(1,) * 8, context_lens=(1500, 3, 256, 257, 1, 900, 64, 1000), **LLAMA)
    *tensors, scale = PagedBatch(query_lens=(1,) * 8, context_lens=batch.context_lens, **LLAMA).arguments()
    q, k_cache, v_cache, start, lens, table = (tensor.to(device) for tensor in tensors)
    arguments = q, k_cache, v_cache, start, lens, table, scale
    attend(*arguments, num_decode_rows=8)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*arguments, num_decode_rows=8)
    for present in (8, 5, 1):
        there = torch.arange(8, device=device) < present
        lens.copy_(torch.where(there, torch.tensor(batch.context_lens, device=device) - (8 - present), 0).clamp(min=0))
        graph.replay()
        assert torch.equal(out, attend(*arguments, num_decode_rows=8))
        assert (out[lens == 0] == 0).all() and out.isfinite().all()


def test_two_graphs_in_two_streams(device: torch.device) -> None:
    """Each step has its own counts, which are zero after each replay."""
    *tensors, scale = PagedBatch(query_lens=(1, 1, 1), context_lens=(3000, 700, 20), **LLAMA).arguments()
    q, k_cache, v_cache, start, lens, table = (tensor.to(device) for tensor in tensors)
    want = attend(q, k_cache, v_cache, start, lens, table, scale, num_decode_rows=3)
    torch.cuda.synchronize()
    steps = [(torch.cuda.Stream(device), torch.cuda.CUDAGraph()) for _ in range(2)]
    arrivals = [torch.zeros(3, 8, dtype=torch.int32, device=device) for _ in steps]
    outs: list[Tensor] = []
    for (_, graph), counts in zip(steps, arrivals, strict=True):
        sequences = PackedSequences(start, lens, table, 3, counts)
        with torch.cuda.graph(graph):
            outs += [paged_attention(q, k_cache, v_cache, sequences, AttentionForm(scale)) for _ in range(4)]
    for _ in range(20):
        for stream, graph in steps:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in outs)
    assert not any(counts.any() for counts in arrivals)


def test_a_long_context_in_rounds(device: torch.device) -> None:
    """More partial sums than the scratch memory takes at once: 24 rows of 64k tokens."""
    num_rows, length = 24, 1 << 16
    generator = torch.Generator(device).manual_seed(0)
    k_cache, v_cache = torch.randn(2, length // 16, 8, 16, 128, device=device, generator=generator).bfloat16()
    q = torch.randn(num_rows, 32, 128, device=device, generator=generator).bfloat16()
    index = {"dtype": torch.int32, "device": device}
    lens = torch.randint(1, length + 1, (num_rows,), generator=generator, **index)
    table = torch.arange(length // 16, **index).expand(num_rows, -1).contiguous()
    start = torch.arange(num_rows + 1, **index)
    got = attend(q, k_cache, v_cache, start, lens, table, 128**-0.5, num_decode_rows=num_rows)
    for row in range(num_rows):
        here = slice(row, row + 1)
        alone = q[here], k_cache, v_cache, start[:2], lens[here], table[here], 128**-0.5
        assert torch.equal(got[here], attend(*alone, num_decode_rows=1)), f"row {row}"
