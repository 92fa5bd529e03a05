"""Applies presence, frequency and repetition penalties, with token counts of each live sequence on the device.

Cost: 5 V bytes per sequence with penalties (246 KB for SmolLM2, 641 KB for Llama 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tightwire.model.sampling.parameters import SamplingRow

_CPU_ROWS = 8  # temporaries fit in the CPU cache


@dataclass(slots=True)
class _Counts:
    """Token counts of one sequence."""

    row: SamplingRow  # kept alive, so that no other object gets its id()
    num_counted: int  # of its token_ids
    count_V: Tensor  # int32, how often each token is in the output
    in_prompt_V: Tensor  # bool


class PenaltyTables:
    """Counts the tokens of sequences with penalties. ``apply_`` updates the counts, also after a preemption."""

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
