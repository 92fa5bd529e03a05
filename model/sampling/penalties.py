"""Presence, frequency and repetition penalties: which tokens each live sequence has had, on the device.

A sequence that has penalties holds one row ("slot") of two tables until it is released: how often each token came in
its output, and whether it was in its prompt. Tables exist only while some sequence needs them.

Cost: 5 V bytes per slot (246 KB for SmolLM2, 641 KB for Llama 3).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tightwire.model.sampling.parameters import SamplingParams

_CPU_ROWS = 8  # temporaries stay in the cache


class PenalizedRow(Protocol):
    """What is read of a sequence; compared by identity."""

    params: SamplingParams
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int


class PenaltyTables:
    """Slots of token counts; ``apply`` brings them up to date by itself, so a preempted sequence needs no care."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, int] = {}  # id() of a row -> slot; the row is kept alive by _rows
        self._rows: dict[int, PenalizedRow] = {}
        self._free: list[int] = []
        self._num_counted: dict[int, int] = {}  # slot -> tokens of token_ids already in the tables
        self._count_SV = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt_SV = torch.empty((0, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_slots(self) -> int:
        """Slots the tables have room for."""
        return self._count_SV.shape[0]

    def apply_(self, logits_RV: Tensor, indices: Sequence[int], rows: Sequence[PenalizedRow]) -> None:
        """Penalize, in place, the rows of ``logits_RV`` at ``indices``, which belong to ``rows``.

        Tokens of prompt or output: positive logits divided by repetition_penalty, negative ones multiplied. Then
        minus frequency_penalty times the count in the output, minus presence_penalty where that count is not 0.
        Source: CTRL, arXiv 1909.05858; OpenAI's API reference.
        """
        slots = [self._update(row) for row in rows]
        num_rows = _CPU_ROWS if logits_RV.is_cpu else len(rows)
        for first in range(0, len(rows), num_rows):
            part = slice(first, first + num_rows)
            index = torch.tensor(indices[part], device=self._device)
            logits_RV[index] = self._penalized(logits_RV[index], slots[part], [row.params for row in rows[part]])

    def _penalized(self, logits_RV: Tensor, slots: list[int], params: list[SamplingParams]) -> Tensor:
        slot_R = torch.tensor(slots, device=self._device)
        count_RV, prompt_RV = self._count_SV[slot_R], self._prompt_SV[slot_R]
        used_RV = count_RV > 0
        repetition, frequency, presence = (
            torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=self._device)[:, None]
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")
        )
        scaled_RV = torch.where(logits_RV > 0, logits_RV / repetition, logits_RV * repetition)
        return torch.where(prompt_RV | used_RV, scaled_RV, logits_RV) - frequency * count_RV - presence * used_RV

    def release(self, row: PenalizedRow) -> None:
        """Free the row's slot, if it has one."""
        slot = self._slots.pop(id(row), None)
        if slot is None:
            return
        del self._rows[id(row)], self._num_counted[slot]
        self._free.append(slot)
        if not self._slots:
            self._free.clear()
            self._resize(0)

    def _update(self, row: PenalizedRow) -> int:
        """The row's slot, with its newest tokens counted."""
        slot = self._slots.get(id(row))
        if slot is None:
            slot = self._take(row)
        new = row.token_ids[self._num_counted[slot] :]
        if new:
            ids = torch.tensor(new, device=self._device)
            self._count_SV[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
            self._num_counted[slot] += len(new)
        return slot

    def _take(self, row: PenalizedRow) -> int:
        if not self._free:
            num_slots = self.num_slots
            self._resize(max(1, 2 * num_slots))
            self._free.extend(range(self.num_slots - 1, num_slots - 1, -1))
        slot = self._free.pop()
        self._slots[id(row)], self._rows[id(row)] = slot, row
        self._count_SV[slot].zero_()
        self._prompt_SV[slot].zero_()
        prompt = torch.tensor(row.token_ids[: row.num_prompt_tokens], dtype=torch.int64, device=self._device)
        self._prompt_SV[slot, prompt] = True
        self._num_counted[slot] = row.num_prompt_tokens
        return slot

    def _resize(self, num_slots: int) -> None:
        kept = min(num_slots, self.num_slots)
        for name in ("_count_SV", "_prompt_SV"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros((num_slots, old.shape[1]))
            new[:kept] = old[:kept]
            setattr(self, name, new)
