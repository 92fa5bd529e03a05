"""Chooses the next token of every sequence in the batch, with batched tensor operations on the logits' device.

The order is that of vLLM: logit_bias; bans (grammar, allowed_token_ids, bad_words, stop tokens below min_tokens); repetition,
frequency and presence penalties; temperature; min_p; top_k; top_p; one draw. Temperature 0 takes the largest logit after penalties; of equal
ones, the lowest id. Logprobs are those of the unmodified logits.

A row's result depends on that row alone (see ``draw``); tests check bit-identity over batch compositions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.transfer import Download, upload
from tightwire.model.sampling.draw import MAX_VOCAB_SIZE, UNSETTLED, Filters, draw, mix_seed, needs_sort, uniforms
from tightwire.model.sampling.grammar import GrammarMasks
from tightwire.model.sampling.logprobs import Scoring
from tightwire.model.sampling.parameters import SamplingParams, SamplingRow, TokenScore


class Sampled(NamedTuple):
    """The chosen tokens, one entry per row; -1 if the largest logit is not finite (NaN, inf, all banned)."""

    token_ids: list[int]
    scores: list[TokenScore | None]  # None if params.logprobs is None
    late: Sequence[int] = ()  # rows whose token was not in ``Choice.ids_R``


class Choice:
    """An asynchronous choice of tokens on the device. The next step can use ``ids_R``, (R,) int32, before ``wait``.

    A row that must be sorted as a whole has a negative number in ``ids_R``; ``wait`` sorts it and reports it as late.
    """

    def __init__(
        self,
        ids_R: Tensor,
        scored_rows: Sequence[int],
        scoring: Scoring | None,
        choose_late: "Callable[[], Choice] | None",
    ) -> None:
        """``scored_rows``: the rows of ``scoring``. ``choose_late``: draws again with sorting; None if no row can be late."""
        self.ids_R = ids_R
        self._scored_rows, self._scoring, self._choose_late = scored_rows, scoring, choose_late
        self._download = Download([ids_R])

    def wait(self) -> Sampled:
        """Wait for the device and return the tokens."""
        token_ids = self._download.wait()[0].tolist()
        if self._choose_late is not None and UNSETTLED in token_ids:
            late = [row for row, token_id in enumerate(token_ids) if token_id == UNSETTLED]
            return self._choose_late().wait()._replace(late=late)
        scores: list[TokenScore | None] = [None] * len(token_ids)
        if self._scoring is not None:
            for row, score in zip(self._scored_rows, self._scoring.wait(), strict=True):
                scores[row] = score
        return Sampled(token_ids, scores)


class Sampler:
    """Holds the penalty tables of live sequences and the parameter tensors of the current batch."""

    def __init__(
        self, vocab_size: int, device: torch.device | str = "cpu", grammars: GrammarMasks | None = None
    ) -> None:
        """``grammars``: None: no row has a grammar."""
        if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"the sampler handles vocabularies of 1 to {MAX_VOCAB_SIZE} tokens, got {vocab_size}")
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._penalties = PenaltyTables(vocab_size, self._device)
        self._batch: _Batch | None = None
        self.grammars = grammars

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """Choose the next token of each row and wait for it; arguments as for ``start``."""
        return self.start(logits_RV, rows, waits=True).wait()

    @torch.inference_mode()
    def start(self, logits_RV: Tensor, rows: Sequence[SamplingRow], *, waits: bool) -> Choice:
        """Start to choose the next token of each row.

        ``logits_RV``: (R, V) float32, not modified. ``rows``: ``token_ids`` ends with the token before the logits, a
        deferred one unless ``params.needs_tokens``. ``waits``: True if the host may wait for the device. If False, it
        waits only for penalties.
        """
        if logits_RV.shape != (len(rows), self._vocab_size):
            raise ValueError(f"expected logits ({len(rows)}, {self._vocab_size}), got {tuple(logits_RV.shape)}")
        if self._batch is None or list(map(id, self._batch.rows)) != list(map(id, rows)):
            self._batch = _Batch(list(rows), self._vocab_size, self._device)
        batch = self._batch
        positions_R = np.array([len(row.token_ids) - row.num_prompt_tokens for row in rows], np.uint64)
        processed_RV = self._processed(logits_RV, batch, positions_R)
        best_R, greedy_R = processed_RV.max(-1)  # the first of equal logits, so the lowest id

        @torch.inference_mode()
        def choose(*, waits: bool) -> Choice:
            ids_R = greedy_R
            for group in batch.groups:
                ids_R = group.draw_into(ids_R, processed_RV, best_R, positions_R, waits=waits)
            scoring = None
            if batch.scored is not None:
                scoring = Scoring(logits_RV[batch.scored], ids_R[batch.scored].clamp(min=0), batch.top_n)
            ids_R = torch.where(best_R.isfinite(), ids_R, -1).int()
            may_be_late = not waits and any(group.filters.top_k_R1 is not None for group in batch.groups)
            return Choice(ids_R, batch.scored_rows, scoring, (lambda: choose(waits=True)) if may_be_late else None)

        return choose(waits=waits)

    @torch.inference_mode()
    def score(self, logits_RV: Tensor, targets: Sequence[int], top_n: int) -> list[TokenScore]:
        """Score ``targets[r]`` under row r, for prompts. Memory use is bounded."""
        target_R = torch.tensor(targets, dtype=torch.int64, device=logits_RV.device)
        return Scoring(logits_RV, target_R, [top_n] * len(targets)).wait()

    def release(self, row: SamplingRow) -> None:
        """Drop the state of a sequence that ended."""
        self._penalties.release(row)
        if self.grammars is not None:
            self.grammars.release(row)
        if self._batch is not None and any(row is held for held in self._batch.rows):
            self._batch = None

    def _processed(self, logits_RV: Tensor, batch: "_Batch", positions_R: np.ndarray) -> Tensor:
        """Return logits after bias, bans and penalties; the same tensor if there are none."""
        banned = batch.banned_at(positions_R)
        unchanged = batch.bias is None and batch.always_banned is None and not banned and not batch.penalized
        if unchanged and not batch.constrained:
            return logits_RV
        if batch.constrained:
            logits_RV = logits_RV.masked_fill(self._banned_by_grammars(batch).to(self._device), -torch.inf)
        else:
            logits_RV = logits_RV.clone()
        if batch.bias is not None:
            row_I, token_id_I, value_I = batch.bias
            logits_RV.index_put_((row_I, token_id_I), value_I, accumulate=True)
        if batch.always_banned is not None:
            row_I, banned_IV = batch.always_banned
            logits_RV[row_I] = logits_RV[row_I].masked_fill_(banned_IV, -torch.inf)
        if banned:
            row_I, token_id_I = upload(banned, torch.int64, self._device).unbind(1)
            logits_RV.index_put_((row_I, token_id_I), torch.full((), -torch.inf, device=self._device))
        if batch.penalized:
            self._penalties.apply_(logits_RV, batch.penalized, [batch.rows[r] for r in batch.penalized])
        return logits_RV

    def _banned_by_grammars(self, batch: "_Batch") -> Tensor:
        """Return (R, V) bool; rows without a grammar ban nothing."""
        assert self.grammars is not None, "the engine accepts no grammar without GrammarMasks"
        banned_IV = self.grammars.banned([batch.rows[r] for r in batch.constrained])
        if len(banned_IV) == len(batch.rows):
            return torch.from_numpy(banned_IV)
        banned_RV = torch.zeros(len(batch.rows), self._vocab_size, dtype=torch.bool)
        banned_RV[batch.constrained] = torch.from_numpy(banned_IV)
        return banned_RV


@dataclass(frozen=True, slots=True)
class _DrawGroup:
    """Rows with the same kind of draw and their parameters as tensors; ``index`` is None for the whole batch."""

    rows: list[int]
    index: Tensor | None
    filters: Filters
    mixed_seeds: np.ndarray

    def draw_into(
        self, ids_R: Tensor, logits_RV: Tensor, best_R: Tensor, positions_R: np.ndarray, *, waits: bool
    ) -> Tensor:
        """Return ``ids_R`` with this group's entries replaced by drawn tokens."""
        numbers = uniforms(self.mixed_seeds, positions_R[self.rows])
        uniform = upload(numbers, torch.float64, logits_RV.device)
        if self.index is None:
            return draw(logits_RV, best_R, self.filters, uniform, waits=waits)
        drawn = draw(logits_RV[self.index], best_R[self.index], self.filters, uniform, waits=waits)
        return ids_R.index_copy(0, self.index, drawn)


class _Batch:
    """The data of a batch that stay the same from step to step."""

    def __init__(self, rows: list[SamplingRow], vocab_size: int, device: torch.device) -> None:
        self.rows = rows
        self._vocab_size = vocab_size
        params = [row.params for row in rows]
        self.bias = _bias_tensors(params, device)
        self.always_banned = _ban_masks(params, vocab_size, device)
        self._worded = [r for r, p in enumerate(params) if any(len(word.steps) > 1 for word in p.bad_words)]
        self._short = [r for r, row in enumerate(rows) if row.params.min_tokens > 0 and row.stop_ids]
        self.constrained = [r for r, p in enumerate(params) if p.grammar]
        self.penalized = [r for r, p in enumerate(params) if p.has_penalties]
        self.scored_rows = [r for r, p in enumerate(params) if p.logprobs is not None]
        self.scored = upload(self.scored_rows, torch.int64, device) if self.scored_rows else None
        self.top_n = [params[r].logprobs or 0 for r in self.scored_rows]
        drawn = [r for r, p in enumerate(params) if not p.is_greedy]
        in_order = [r for r in drawn if not needs_sort(params[r], vocab_size)]
        ranked = [r for r in drawn if needs_sort(params[r], vocab_size)]
        self.groups = [self._make_group(chosen, device) for chosen in (in_order, ranked) if chosen]

    def banned_at(self, positions_R: np.ndarray) -> list[tuple[int, int]]:
        """Return (row, token id) of early stop tokens and ends of bad words, after ``positions_R`` generated tokens."""
        stops = [
            (r, token_id)
            for r in self._short
            if positions_R[r] < self.rows[r].params.min_tokens
            for token_id in self.rows[r].stop_ids
        ]
        return stops + [
            (r, token_id)
            for r in self._worded
            for word in self.rows[r].params.bad_words
            if (num_seen := min(len(word.steps) - 1, int(positions_R[r]))) > 0
            for token_id in word.ends_after(self.rows[r].token_ids[-num_seen:])
        ]

    def _make_group(self, chosen: list[int], device: torch.device) -> _DrawGroup:
        params = [self.rows[r].params for r in chosen]
        filters = Filters.of(params, self._vocab_size, device)
        index = None if len(chosen) == len(self.rows) else upload(chosen, torch.int64, device)
        return _DrawGroup(chosen, index, filters, np.array([mix_seed(p.seed) for p in params], np.uint64))


def _ban_masks(params: list[SamplingParams], vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return rows and (I, V) their tokens that are banned at every step; None if there are none."""
    singles = [[token_id for word in p.bad_words for token_id in word.whole] for p in params]
    rows = [r for r, p in enumerate(params) if p.allowed_token_ids is not None or singles[r]]
    if not rows:
        return None
    banned_IV = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for banned_V, r in zip(banned_IV, rows, strict=True):
        if (allowed := params[r].allowed_token_ids) is not None:
            banned_V[:] = True
            banned_V[list(allowed)] = False
        banned_V[singles[r]] = True
    return upload(rows, torch.int64, device), banned_IV.to(device)


def _bias_tensors(params: list[SamplingParams], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return rows, token ids and biases; None if there are none."""
    entries = [(r, token_id, value) for r, p in enumerate(params) for token_id, value in p.logit_bias.items()]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    row_I, token_id_I = (upload(ids, torch.int64, device) for ids in (rows, token_ids))
    return row_I, token_id_I, upload(values, torch.float32, device)


_CPU_ROWS = 8  # temporaries fit in the CPU cache


@dataclass(slots=True)
class _Counts:
    """Token counts of one sequence."""

    row: SamplingRow  # kept alive, so that no other object gets its id()
    num_counted: int  # of its token_ids
    count_V: Tensor  # int32, how often each token is in the output
    in_prompt_V: Tensor  # bool


class PenaltyTables:
    """Counts the tokens of sequences with penalties. ``apply_`` updates the counts, also after a preemption.

    Cost: 5 V bytes per sequence (246 KB for SmolLM2, 641 KB for Llama 3).
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._counts: dict[int, _Counts] = {}  # by id() of the row

    def apply_(self, logits_RV: Tensor, indices: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        """Penalize in place the rows of ``logits_RV`` at ``indices``, which belong to ``rows``.

        For tokens of prompt or output, divide positive logits by repetition_penalty and multiply negative ones by it.
        Then subtract frequency_penalty times the count in the output, and presence_penalty if that count is not 0.
        Source: CTRL, arXiv 1909.05858; OpenAI's API reference.
        """
        counts = [self._update(row) for row in rows]
        num_rows = _CPU_ROWS if logits_RV.is_cpu else len(rows)
        for first in range(0, len(rows), num_rows):
            part = slice(first, first + num_rows)
            index = torch.tensor(indices[part], device=self._device)
            logits_RV[index] = self._penalize(logits_RV[index], counts[part])

    def release(self, row: SamplingRow) -> None:
        """Drop the row's counts, if there are any."""
        self._counts.pop(id(row), None)

    def _penalize(self, logits_RV: Tensor, counts: Sequence[_Counts]) -> Tensor:
        count_RV = torch.stack([each.count_V for each in counts])
        prompt_RV = torch.stack([each.in_prompt_V for each in counts])
        used_RV = count_RV > 0
        params = [each.row.params for each in counts]
        penalties = [(own.repetition_penalty, own.frequency_penalty, own.presence_penalty) for own in params]
        repetition, frequency, presence = torch.tensor(penalties, dtype=torch.float32, device=self._device).T[
            :, :, None
        ]
        scaled_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
        return torch.where(prompt_RV | used_RV, scaled_RV, logits_RV) - frequency * count_RV - presence * used_RV

    def _update(self, row: SamplingRow) -> _Counts:
        counts = self._counts.get(id(row))
        if counts is None:
            counts = self._counts[id(row)] = self._start(row)
        new = row.token_ids[counts.num_counted :]
        if new:
            ids = torch.tensor(new, device=self._device)
            counts.count_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            counts.num_counted += len(new)
        return counts

    def _start(self, row: SamplingRow) -> _Counts:
        in_prompt_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        prompt = torch.tensor(row.token_ids[: row.num_prompt_tokens], dtype=torch.int64, device=self._device)
        in_prompt_V[prompt] = True
        count_V = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        return _Counts(row, row.num_prompt_tokens, count_V, in_prompt_V)
