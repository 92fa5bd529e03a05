"""A paged batch made from a seed, and its attention in float64 by a plain loop over the sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightwire.kernels.attention import paged_attention
from tightwire.kernels.spec.attention import AttentionForm, HeadGroups, KeyBias, PackedSequences, turned_bias
from tightwire.kernels.spec.int8_heads import SCALE_BYTES, parts_of, quantize_heads_reference

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *sequences_and_scale: Tensor | float,
    num_decode_rows: int = 0,
    groups: HeadGroups | None = None,
    function: Callable[..., Tensor] = paged_attention,
    **form: Any,
) -> Tensor:
    """``function`` of the flat ``PagedBatch.arguments``."""
    start, lens, table, scale = sequences_and_scale
    sequences = PackedSequences(start, lens, table, num_decode_rows)  # pyright: ignore[reportArgumentType]
    return function(q, k_cache, v_cache, sequences, AttentionForm(scale, groups, **form))  # pyright: ignore[reportArgumentType]


@dataclass(kw_only=True)
class PagedBatch:
    """Sequences with ``context_lens`` cached tokens, of which the last ``query_lens`` are this step's."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    tokens_per_block: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int = 0
    cap: float = 0.0
    garbage: float = float("nan")  # what slots hold that no sequence has written
    q_rows: list[Tensor] = field(init=False)  # per sequence (context, H, E): queries of all its tokens
    keys: list[Tensor] = field(init=False)  # per sequence (context, K, E)
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generators = [torch.Generator().manual_seed(self.seed + 1000 * length) for length in self.context_lens]
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        rows = [
            [torch.randn(length, count, self.head_dim, generator=generator).to(self.dtype) for count in heads]
            for length, generator in zip(self.context_lens, generators, strict=True)
        ]
        self.q_rows, self.keys, self.values = (list(column) for column in zip(*rows, strict=True))

    def arguments(self) -> Arguments:
        """Queries, filled caches, query starts, context lengths, a table of shuffled blocks, and the scale.

        With a window the table names a block of garbage in place of those that no row reads.
        """
        counts = [-(-length // self.tokens_per_block) for length in self.context_lens]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed)).int()
        table = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32)
        shape = (num_blocks, self.num_kv_heads, self.tokens_per_block, self.head_dim)
        k_cache = torch.full(shape, self.garbage, dtype=self.dtype)
        v_cache = torch.full(shape, self.garbage, dtype=self.dtype)
        used = 0
        for seq, count in enumerate(counts):
            table[seq, :count] = order[used : used + count]
            used += count
            for position in range(self.context_lens[seq]):
                block, offset = table[seq, position // self.tokens_per_block], position % self.tokens_per_block
                k_cache[block, :, offset] = self.keys[seq][position]
                v_cache[block, :, offset] = self.values[seq][position]
            if self.window:  # blocks before the first row's window, and before the key tile where it begins, are gone
                first_key = self.context_lens[seq] - self.query_lens[seq] + 1 - self.window
                table[seq, : max(0, first_key) // 64 * 64 // self.tokens_per_block] = order[-1]
        lens = torch.tensor(self.query_lens, dtype=torch.int32)
        start = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).int()])
        context = torch.tensor(self.context_lens, dtype=torch.int32)
        return self.queries(), k_cache, v_cache, start, context, table, self.head_dim**-0.5

    def part(self, first: int, stop: int) -> tuple[Arguments, HeadGroups]:
        """``arguments`` of query heads ``first`` to ``stop`` with the KV heads that they need, and their groups."""
        q, k_cache, v_cache, *rest = self.arguments()
        per_kv = self.num_heads // self.num_kv_heads
        kept = slice(first // per_kv, -(-stop // per_kv))
        caches = k_cache[:, kept].contiguous(), v_cache[:, kept].contiguous()
        return (q[:, first:stop], *caches, *rest), HeadGroups(per_kv, first % per_kv)  # pyright: ignore[reportReturnType]

    def in_8_bits(self, bias: float = 0.0) -> tuple[Arguments, KeyBias | None]:
        """``arguments`` with caches in int8. ``keys`` and ``values`` become what they hold, with a turned bias of that size."""
        q, *caches, start, context, table, scale = self.arguments()
        coded = [torch.empty(*cache.shape[:3], self.head_dim + SCALE_BYTES, dtype=torch.int8) for cache in caches]
        for cache, target in zip(caches, coded, strict=True):
            for part, stored in zip(parts_of(target), quantize_heads_reference(cache), strict=True):
                part.copy_(stored)
        self.keys, self.values = ([_decoded(x) for x in numbers] for numbers in (self.keys, self.values))
        arguments = q, *coded, start, context, table, scale
        if not bias:
            return arguments, None  # pyright: ignore[reportReturnType]
        half = self.head_dim // 4  # half of a head's numbers are rotated
        bias_KE = bias * torch.randn(self.num_kv_heads, self.head_dim, generator=torch.Generator().manual_seed(1))
        angles_SN = torch.arange(max(self.context_lens))[:, None] * 10000.0 ** (-torch.arange(half) / half)
        key_bias = KeyBias(bias_KE, angles_SN.cos(), angles_SN.sin())
        self.keys = [keys + turned_bias(key_bias, torch.arange(len(keys))) for keys in self.keys]
        return arguments, key_bias  # pyright: ignore[reportReturnType]

    def rounding_of_keys(self) -> Tensor:
        """How far rounding keys and values to a 16-bit dtype may move the result: half a unit of each."""
        half = torch.finfo(self.dtype).eps / 2
        outs = []
        for weights, sizes, values in self._sequences():
            off_HT = half * (2 * sizes.amax(-1) + 1)
            outs.append(off_HT.T[..., None] * torch.einsum("hts,she->the", weights, values.abs()))
        return torch.cat(outs)

    def queries(self) -> Tensor:
        return torch.cat([q[len(q) - count :] for q, count in zip(self.q_rows, self.query_lens, strict=True)])

    def expected(self) -> tuple[Tensor, Tensor]:
        """Attention in float64, and how far float32 arithmetic may be from it, element by element.

        A score sums E products, so it is off by at most E + 2 roundings of the sum of their sizes, as is the exponent
        of its weight; a weight by that and a few roundings of its own; the result sums S weighted values.
        """
        outs, bounds = [], []
        eps = torch.finfo(torch.float32).eps
        for weights, sizes, values in self._sequences():
            off = (2 * (self.head_dim + 4) * sizes.amax(-1) + len(values) + 20 + 8 * self.cap) * eps
            outs.append(torch.einsum("hts,she->the", weights, values))
            bounds.append(off.T[..., None] * torch.einsum("hts,she->the", weights, values.abs()))
        return torch.cat(outs), torch.cat(bounds)

    def check(self, got: Tensor, *, rounds_weights: bool) -> None:
        """Assert that ``got`` is within the bound of float32 arithmetic and of what a 16-bit dtype rounds."""
        want, bound = self.expected()
        assert got.dtype == self.dtype and got.is_contiguous()
        if self.dtype != torch.float32:
            bound = bound + self.rounding_of_weights() if rounds_weights else bound
            bound = bound + (want.abs() + bound) * torch.finfo(self.dtype).eps / 2  # the result is rounded once
        error = (got.double() - want).abs()
        assert bool((error <= bound).all()), f"{self.dtype}: off by {(error / bound).max():.1f} bounds"

    def rounding_of_weights(self) -> Tensor:
        """How far rounding the weights to a 16-bit dtype may move the result; the largest of them is 1 when rounded.

        Half a unit of each, and for those below the smallest normal number half of the smallest step there is.
        """
        limits = torch.finfo(self.dtype)
        step = limits.smallest_normal * limits.eps
        return torch.cat(
            [
                torch.einsum("hts,she->the", limits.eps / 2 * weights + step / 2 * (weights > 0), values.abs())
                for weights, _, values in self._sequences()
            ]
        )

    def _sequences(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Per sequence, in float64: weights (H, T, S), the sums of their scores' sizes, values (S, H, E)."""
        per_kv_head = self.num_heads // self.num_kv_heads
        for seq, count in enumerate(self.query_lens):
            length = self.context_lens[seq]
            q = self.q_rows[seq][length - count :].double() * self.head_dim**-0.5
            k = self.keys[seq].double().repeat_interleave(per_kv_head, 1)
            v = self.values[seq].double().repeat_interleave(per_kv_head, 1)
            hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
            if self.window:
                hidden |= torch.arange(length) <= torch.arange(length - count, length)[:, None] - self.window
            scores = torch.einsum("the,she->hts", q, k)
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            yield weights, torch.einsum("the,she->hts", q.abs(), k.abs()).masked_fill(hidden, 0.0), v


def _decoded(x: Tensor) -> Tensor:
    codes, scales = quantize_heads_reference(x)
    return codes.float() * scales.float().unsqueeze(-1)
