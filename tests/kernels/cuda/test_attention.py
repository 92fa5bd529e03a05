"""The GPU's attention in Triton's interpreter: within rounding of float64, and the same bits whatever runs beside a row.

The interpreter multiplies matrices in float32, in which products of 16-bit numbers are exact, as on a GPU.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import nan
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from helpers.model.paged_batch import PagedBatch, attend
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.attention import AttentionForm, HeadGroups, PackedSequences, check_attention

pytestmark = needs_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Generated rows of contexts of one to nine chunks, a sequence that is computed again, a first token, then prompts.
MIXED: dict[str, Any] = {"query_lens": (1, 1, 3, 1, 45, 1, 20), "context_lens": (300, 64, 530, 1, 45, 33, 70)}
NUM_DECODE = 6
ONE_KV_HEAD: dict[str, Any] = {"num_heads": 3, "num_kv_heads": 1}


@contextmanager
def _rows_multiplied_alone() -> Iterator[None]:
    """The interpreter's product is BLAS's, in which a row's bits depend on where it stands; on a GPU they do not."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        result = total.data.copy()
        for k in range(a.data.shape[1]):
            result += a.data[:, k : k + 1] * b.data[k : k + 1]
        return TensorHandle(result, total.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


def _attend(
    arguments: tuple[Any, ...], num_decode_rows: int = 0, groups: HeadGroups | None = None, **form: Any
) -> Tensor:
    from tightwire.kernels.cuda.attention import paged_attention

    return attend(*arguments, num_decode_rows=num_decode_rows, groups=groups, function=paged_attention, **form)


def _assert_close(batch: PagedBatch, num_decode_rows: int) -> None:
    form = {"window": batch.window, "cap": batch.cap}
    batch.check(_attend(batch.arguments(), num_decode_rows, **form), rounds_weights=True)


def _check_mixed(group: Group) -> None:
    for dtype in (torch.float32, torch.float16):
        _assert_close(PagedBatch(**MIXED, **ONE_KV_HEAD, dtype=dtype), NUM_DECODE)
    _assert_close(PagedBatch(**MIXED, dtype=torch.bfloat16), NUM_DECODE)


def _check_windows_and_caps(group: Group) -> None:
    for window, cap in ((1, 0.0), (20, 2.0), (300, 0.0), (0, 2.0)):
        _assert_close(PagedBatch(**MIXED, **ONE_KV_HEAD, window=window, cap=cap), NUM_DECODE)
    _assert_close(PagedBatch(**MIXED, dtype=torch.bfloat16, window=40, cap=5.0), NUM_DECODE)


@_rows_multiplied_alone()
def _check_parts_of_groups(group: Group) -> None:
    """Heads that begin and end inside a KV head's group: the bits that they have among all heads."""
    for longest in (300, 20):  # chunks that are merged, and one alone
        batch = PagedBatch(query_lens=(1, 1, 20), context_lens=(longest, 64, 70), dtype=torch.bfloat16)
        whole = _attend(batch.arguments(), 2)
        for first, stop in ((0, 5), (5, 9), (4, 7)):
            arguments, groups = batch.part(first, stop)
            assert torch.equal(_attend(arguments, 2, groups), whole[:, first:stop])


def _check_random_batches(group: Group, dtype: torch.dtype) -> None:
    """Sizes of heads and blocks, lengths and the number of generated rows drawn from a seed."""
    rng = random.Random(f"{dtype}")
    for seed in range(2):
        num_seqs = rng.randint(1, 5)
        num_generated = rng.randint(0, num_seqs)
        context_lens = [rng.choice((1, 2, 15, 16, 17, 64, 100, 255, 256, 257, 600)) for _ in range(num_seqs)]
        query_lens = [
            1 if seq < num_generated else min(length, rng.choice((1, 7, 43, 64, 130)))
            for seq, length in enumerate(context_lens)
        ]
        num_kv_heads, per_kv_head = rng.choice(((1, 1), (3, 3), (1, 8), (2, 4), (4, 1), (1, 20)))
        batch = PagedBatch(
            query_lens=query_lens,
            context_lens=context_lens,
            num_heads=num_kv_heads * per_kv_head,
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice((8, 64, 80, 96, 128)),
            tokens_per_block=rng.choice((16, 32, 8, 24)),
            dtype=dtype,
            seed=seed,
        )
        _assert_close(batch, num_generated)


@_rows_multiplied_alone()
def _check_neighbours(group: Group) -> None:
    together = _attend(PagedBatch(**MIXED, **ONE_KV_HEAD, dtype=torch.bfloat16).arguments(), NUM_DECODE)
    first = 0
    for query_len, context_len in zip(*MIXED.values(), strict=True):
        alone = PagedBatch(query_lens=(query_len,), context_lens=(context_len,), dtype=torch.bfloat16, **ONE_KV_HEAD)
        got = _attend(alone.arguments(), query_len if first < NUM_DECODE else 0)
        assert torch.equal(got, together[first : first + query_len]), f"sequence from row {first}"
        first += query_len


@_rows_multiplied_alone()
def _check_chunks(group: Group) -> None:
    """A prompt in chunks, and generated tokens one by one: the bits that they have when all are computed at once."""
    for length, chunks, generated in (
        (90, (7, 7, 76), False),
        (90, (64, 26), False),
        (90, (1, 89), False),
        (270, (266, 1, 1, 1, 1), True),
    ):
        batch = PagedBatch(query_lens=(length,), context_lens=(length,), dtype=torch.bfloat16, **ONE_KV_HEAD)
        q, k_cache, v_cache, _, _, table, scale = batch.arguments()
        first = chunks[0] if generated else 0
        whole = _attend_rows(q, first, length, (k_cache, v_cache), table, scale, generated=generated)
        done = first
        for chunk in chunks[1:] if generated else chunks:
            part = _attend_rows(q, done, done + chunk, (k_cache, v_cache), table, scale, generated=generated)
            assert torch.equal(part, whole[done - first :][:chunk]), f"{chunk} rows from {done}"
            done += chunk
        assert done == length


def _attend_rows(
    q: Tensor, first: int, stop: int, caches: tuple[Tensor, Tensor], table: Tensor, scale: float, *, generated: bool
) -> Tensor:
    """Rows ``first`` to ``stop`` of the one sequence there is."""
    start = torch.tensor([0, stop - first], dtype=torch.int32)
    context = torch.tensor([stop], dtype=torch.int32)
    return _attend((q[first:stop], *caches, start, context, table, scale), (stop - first) * generated)


@contextmanager
def _programs_backwards() -> Iterator[None]:
    """The interpreter runs programs one by one: here the last one first."""
    from triton.runtime.interpreter import InterpreterBuilder

    program_id: Any = InterpreterBuilder.create_get_program_id

    def create_get_program_id(self: Any, axis: int) -> Any:
        result = program_id(self, axis)
        result.data = self.grid_dim[axis] - 1 - result.data
        return result

    with patch.object(InterpreterBuilder, "create_get_program_id", create_get_program_id):
        yield


def _check_sharing(group: Group) -> None:
    """How many programs share a row, which ends last, how many rows go at once, and a table with room for more change no bit.

    All calls count in the same zeros, and leave zeros; each takes one launch for each round of rows.
    """
    from tightwire.kernels.cuda import attention_decode as decode

    q, k_cache, v_cache, start, lens, table, scale = PagedBatch(
        query_lens=(1, 1, 1), context_lens=(700, 3, 256), num_heads=6, num_kv_heads=2
    ).arguments()
    arrivals = torch.zeros(3, 2, dtype=torch.int32)
    forwards, backwards, memory = nullcontext, _programs_backwards, 1 << 20
    cases = (1, memory, 0, forwards), (16, memory, 0, backwards), (100, memory, 0, backwards)
    cases = *cases, (100, 1, 0, forwards), (1, 1, 99, forwards)
    by_sizes: list[Tensor] = []
    for few, longest, most in ((16, 256, 64), (2, 128, 64), (2, 128, 3)):  # chunks of 700 keys: 64, 128, 256
        outs: list[Tensor] = []
        sizes: dict[str, Any] = {"_FEW_CHUNKS": few, "LONG_CHUNK_KEYS": longest, "MAX_CHUNKS": most}
        for programs, scratch_bytes, more, order in cases:
            wider = torch.cat((table, torch.zeros(3, more, dtype=torch.int32)), dim=1)
            sequences = PackedSequences(start, lens, wider, num_decode_rows=3, arrivals_TK=arrivals)
            outs.append(torch.full(q.shape, torch.nan))
            given = q, k_cache, v_cache, sequences, AttentionForm(scale), outs[-1]
            sizes["_PROGRAMS_PER_PROCESSOR"] = programs
            with (
                order(),
                patch.multiple(decode, **sizes),
                patch.object(decode, "launch", wraps=decode.launch) as launch,
            ):
                decode.attend_decode_rows(*given, scratch_bytes=scratch_bytes)
            assert launch.call_count == (3 if scratch_bytes == 1 else 1)
            assert not arrivals.any()
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
        by_sizes.append(outs[0])
    for one, other in pairwise(by_sizes):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other)


def _check_many_lengths(group: Group) -> None:
    """Chunks of every length, and as many heads as are merged in parts: within rounding of float64."""
    from tightwire.kernels.cuda import attention_decode as decode

    sizes: dict[str, Any] = {"LONG_CHUNK_KEYS": 128, "_FEW_CHUNKS": 2, "MAX_CHUNKS": 3}
    with patch.multiple(decode, **sizes):
        for length in (64, 65, 128, 129, 256, 257, 384, 385, 500):
            batch = PagedBatch(query_lens=(1,), context_lens=(length,), num_heads=20, num_kv_heads=1, head_dim=16)
            _assert_close(batch, 1)


def _check_interleaved(group: Group) -> None:
    """Programs that take turns in any order, as ``helpers/ptx`` runs them: the same bits, and counts that end at zero."""
    from tightwire.kernels.cuda import attention_decode as decode

    q, k_cache, v_cache, start, lens, table, scale = PagedBatch(
        query_lens=(1, 1), context_lens=(200, 70), num_heads=16, num_kv_heads=2, dtype=torch.bfloat16
    ).arguments()
    arrivals, outs = torch.zeros(2, 2, dtype=torch.int32), list[Tensor]()
    sequences = PackedSequences(start, lens, table, 2, arrivals)
    for programs in (1, 8, 16, 16, 16):
        outs.append(torch.full_like(q, torch.nan))
        unwritten = patch.object(Tensor, "new_empty", lambda _, size, dtype: torch.full(size, nan, dtype=dtype))
        with unwritten, patch.object(decode, "_PROGRAMS_PER_PROCESSOR", programs):
            decode.attend_decode_rows(q, k_cache, v_cache, sequences, AttentionForm(scale), outs[-1])
        assert torch.equal(outs[-1], outs[0]) and outs[0].isfinite().all(), "merged before all was there"
        assert not arrivals.any(), "merged, and left counts"


def _check_unread(group: Group) -> None:
    """Slots that nobody wrote hold NaN in all these tests; unused entries of the table name blocks that do not exist."""
    q, k_cache, v_cache, start, lens, table, scale = PagedBatch(**MIXED, **ONE_KV_HEAD).arguments()
    want = _attend((q, k_cache, v_cache, start, lens, table, scale), NUM_DECODE)
    used = torch.arange(table.shape[1]) < (lens[:, None] + 15) // 16
    table = torch.where(used, table, 1 << 30).int()
    wide = torch.randn(q.shape[0], q.shape[1] + 6, q.shape[2])
    wide[:, 2 : 2 + q.shape[1]] = q
    view = wide[:, 2 : 2 + q.shape[1]]
    assert torch.equal(_attend((view, k_cache, v_cache, start, lens, table, scale), NUM_DECODE), want)


def _check_padding(group: Group) -> None:
    """Rows without keys, as a captured graph has for sequences that are not there, are zeros, and disturb nobody."""
    for context in (20, 60, 400):  # with one chunk, also of a table with room for more, and with seven
        q, k_cache, v_cache, start, lens, table, scale = PagedBatch(
            query_lens=(1,), context_lens=(context,)
        ).arguments()
        want = _attend((q, k_cache, v_cache, start, lens, table, scale), 1)
        padded = (
            torch.cat((q, torch.full_like(q, torch.nan))),
            k_cache,
            v_cache,
            torch.tensor([0, 1, 2], dtype=torch.int32),
            torch.tensor([context, 0], dtype=torch.int32),
            torch.cat((table, torch.full_like(table, -1))),
            scale,
        )
        assert torch.equal(_attend(padded, 2), torch.cat((want, torch.zeros_like(want))))


def _check_far_scores(group: Group) -> None:
    batch = PagedBatch(**MIXED, **ONE_KV_HEAD)
    batch.q_rows = [q * 300 for q in batch.q_rows]  # weights from 1 down to 2^-1000s
    _assert_close(batch, NUM_DECODE)


def _check_8_bits(group: Group) -> None:
    """Within rounding of what the caches hold, with and without a bias of keys; decode rows and prompts."""
    from tightwire.kernels.cuda.attention import paged_attention

    several: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
    for dtype, bias, heads in (
        (torch.float32, 0.0, ONE_KV_HEAD),
        (torch.float32, 30.0, several),
        (torch.bfloat16, 0.0, several),
        (torch.bfloat16, 30.0, ONE_KV_HEAD),
    ):
        batch = PagedBatch(**MIXED, **heads, dtype=dtype)
        arguments, key_bias = batch.in_8_bits(bias)
        want, bound = batch.expected()
        got = attend(*arguments, num_decode_rows=NUM_DECODE, function=paged_attention, key_bias=key_bias)
        if dtype != torch.float32:
            bound = bound + batch.rounding_of_weights() + batch.rounding_of_keys()
            bound = bound + (want.abs() + bound) * torch.finfo(dtype).eps
        assert bool(((got.double() - want).abs() <= bound).all())


def _check_refusals(group: Group) -> None:
    fits = PagedBatch(query_lens=(3, 1), context_lens=(20, 9)).arguments()
    q, k_cache, v_cache, start, lens, table, scale = fits
    wide = torch.zeros(1, 1, 1, 300)
    one = torch.ones(1, dtype=torch.int32)
    for arguments, num_decode_rows, message in (
        ((q[:, :, :32], *fits[1:]), 0, "as many groups of query heads as KV heads"),
        ((q, k_cache, v_cache, start, lens, table.long(), scale), 0, "int32"),
        (fits, 5, "0 to 4 decode rows"),
        ((*fits[:-1], 0.0), 0, "a scale above 0"),
        ((wide[0], wide, wide, torch.cat((0 * one, one)), one, one[None], 1.0), 1, "heads of at most 256 numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            _attend(arguments, num_decode_rows)
    sequences = PackedSequences(start, lens, table, 2, torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=re.escape("counts arrivals in (2, 3) int32, got (2, 1)")):
        check_attention(q, k_cache, v_cache, sequences, AttentionForm(scale))
    assert _attend((q[:0], k_cache, v_cache, start[:1], lens[:0], table[:0], scale)).shape == (0, 9, 64)


@pytest.mark.parametrize(
    "check",
    [
        _check_mixed,
        _check_neighbours,
        _check_chunks,
        _check_sharing,
        _check_many_lengths,
        _check_unread,
        _check_padding,
        _check_far_scores,
        _check_8_bits,
        _check_refusals,
        _check_parts_of_groups,
    ],
)
def test_in_the_interpreter(check: Any, interpreted: InterpretedRank) -> None:
    interpreted(check)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_batches(dtype: torch.dtype, interpreted: InterpretedRank) -> None:
    interpreted(_check_random_batches, dtype)


def test_windows_and_caps(interpreted: InterpretedRank) -> None:
    interpreted(_check_windows_and_caps)
