"""Chooses the tokens of a step on every rank, from the columns of the logits that each rank has.

Ranks tell each other keys, once: 8 bytes a row for the largest logit or for a draw from the softmax, 8 bytes for each of top_k,
and a front (``draw``) for min_p and top_p. For top_p they then tell the masses of the tokens before each of the front; on CPUs
not if nothing is before the best. A row with logprobs takes two rounds more. No rank ever has all logits.

The order is that of vLLM: logit_bias; bans; repetition, frequency and presence penalties; temperature; min_p; top_k; top_p;
one draw. Each filter applies to the result of the previous one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.kernels.best_number import best_keys, keys_of
from tightwire.kernels.transfer import upload
from tightwire.model.sampling.draw import WEIGHT, chosen, front_of_sorted, logits_and_ids, scores_of, steps_of, top_keys
from tightwire.model.sampling.host_draw import HostDraw
from tightwire.model.sampling.logprobs import ROWS_AT_ONCE, Gather, score_tokens
from tightwire.model.sampling.rows import Column, Kind, SampleRows, unpacked_edits


class TokenChooser:
    """One rank's part in choosing tokens. All ranks call ``choose`` with the same rows and their own logits."""

    def __init__(
        self,
        vocab_rows: Sequence[range],
        rank: int,
        device: torch.device,
        gather: Callable[[Tensor, str], Sequence[Tensor]],
    ) -> None:
        """``vocab_rows``: the token ids of each rank's columns. ``gather``: a ``Gather`` that is told the phase too."""
        self._ids, self._gather, self._device = vocab_rows[rank], gather, device
        self._vocab_size, self._most_columns = vocab_rows[-1].stop, max(map(len, vocab_rows))
        self._by_row, self._alone = device.type == "cpu", len(vocab_rows) == 1
        self._steps_V = steps_of(torch.arange(self._ids.start, self._ids.stop, device=device))

    @torch.inference_mode()
    def choose(self, logits_RV: Tensor, rows: SampleRows, banned: bytes = b"", phase: str = "") -> Tensor:
        """Return ``rows.num_results`` int64, the same on all ranks: R tokens, and scores as ``logprobs`` has them.

        A token is ``NOT_FINITE`` if the row's largest logit is not a finite number, ``ALL_BANNED`` if all of them are banned.
        ``logits_RV``: float32, not modified. ``banned``: a bit for each token of the vocabulary, for each masked row.
        """
        num_rows, targets_R = len(rows.table_RC), rows.column(Column.TARGET)
        if logits_RV.shape != (num_rows, len(self._ids)):
            raise ValueError(f"expected logits ({num_rows}, {len(self._ids)}), got {tuple(logits_RV.shape)}")

        def gather(x: Tensor) -> Sequence[Tensor]:
            return self._gather(x, phase)

        choosing = np.flatnonzero(targets_R < 0)
        drawn_R = self._draw(_take(logits_RV, choosing), rows, choosing, banned, gather) if len(choosing) else None
        ids_R = drawn_R
        if ids_R is None or len(ids_R) < num_rows:
            ids_R = _put(upload(targets_R, torch.int64, self._device), choosing, drawn_R)
        if not len(rows.scored):
            return ids_R
        scored_R = upload(rows.scored, torch.int64, self._device)
        scores = score_tokens(logits_RV, scored_R, ids_R[scored_R], rows.num_top, self._ids.start, gather)
        return torch.cat([ids_R, scores.view(-1)])

    def _edited(self, logits_RV: Tensor, rows: SampleRows, choosing: np.ndarray, banned: bytes) -> Tensor:
        """Return logits of the rows ``choosing`` after bias, bans and penalties; the same tensor if there are none."""
        if not (rows.bias or rows.counts or banned):
            return logits_RV
        logits_RV = logits_RV.clone()
        if rows.bias:
            row_I, column_I, value_I = self._uploaded(rows.bias, choosing)
            logits_RV.index_put_((row_I, column_I), value_I, accumulate=True)
        if banned:
            masked = np.flatnonzero(rows.column(Column.MASKED)[choosing])
            bits = np.frombuffer(banned, np.uint8).reshape(len(masked), -1)
            banned_IV = np.unpackbits(bits, 1, self._vocab_size)[:, self._ids.start : self._ids.stop].astype(bool)
            row_I = upload(masked, torch.int64, self._device)
            logits_RV[row_I] = logits_RV[row_I].masked_fill_(upload(banned_IV, torch.bool, self._device), -torch.inf)
        if rows.counts:
            row_I, column_I, count_I = self._uploaded(rows.counts, choosing)
            penalties = (Column.REPETITION, Column.FREQUENCY, Column.PRESENCE)
            table_RC = upload(rows.table_RC[choosing][:, penalties], torch.float32, self._device)
            repetition_I, frequency_I, presence_I = table_RC[row_I].unbind(1)
            logit_I = logits_RV[row_I, column_I]
            logit_I = torch.where(logit_I > 0, logit_I / repetition_I, logit_I * repetition_I)
            logits_RV[row_I, column_I] = logit_I - frequency_I * count_I - presence_I * (count_I > 0)
        return logits_RV

    def _uploaded(self, edits: bytes, choosing: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        row_I, column_I, value_I = unpacked_edits(edits, self._ids)
        row, column = (upload(x, torch.int64, self._device) for x in (np.searchsorted(choosing, row_I), column_I))
        return row, column, upload(value_I, torch.float32, self._device)

    def _draw(self, logits_RV: Tensor, rows: SampleRows, choosing: np.ndarray, banned: bytes, gather: Gather) -> Tensor:
        """Return the tokens drawn for the rows ``choosing``, whose logits are given."""
        logits_RV = self._edited(logits_RV, rows, choosing, banned)
        kind_R = rows.column(Column.KIND)[choosing].astype(int)
        if self._alone and not self._by_row and (kind_R == Kind.GREEDY).all():
            return chosen(*logits_RV.max(1), banned)  # as below, in a quarter of the kernels: no other rank needs keys
        by_row = np.flatnonzero(kind_R >= Kind.PLAIN) if self._by_row else kind_R[:0]
        host = [logits_RV[row].numpy() for row in by_row]
        draws = [HostDraw(host, self._ids.start, rows.table_RC[choosing[by_row]])] if host else []
        places = {Kind(kind): np.flatnonzero(kind_R == kind) for kind in np.unique(np.delete(kind_R, by_row)).tolist()}
        # A greedy row needs nothing of the table.
        table_RC = upload(rows.table_RC if any(places) else rows.table_RC[:, :0], torch.float64, self._device)
        groups = {
            kind: self._group(rows, choosing[place], _take(logits_RV, place), table_RC)
            for kind, place in places.items()
        }
        keys = [draw.own_keys() for draw in draws]
        keys += [self._local_keys(kind, group) for kind, group in groups.items()]
        gathered = gather(torch.cat([own.view(-1) for own in keys]))
        by_rank = [own.split([own.numel() for own in keys]) for own in gathered]
        drawn_R = torch.empty(len(choosing), dtype=torch.int64, device=self._device)
        for draw in draws:
            drawn_R = _put(drawn_R, by_row, chosen(*draw.tokens([own[0] for own in by_rank], gather), banned))
        for number, (kind, group) in enumerate(groups.items(), len(draws)):
            keys_RC = torch.cat([own[number].view(keys[number].shape) for own in by_rank], 1)
            best_R, id_R = logits_and_ids(self._winners(kind, group, keys_RC, gather))
            if kind is not Kind.GREEDY:
                best_R = logits_and_ids(keys_RC.amax(1))[0]
            drawn_R = _put(drawn_R, places[kind], chosen(best_R, id_R, banned))
        return drawn_R

    def _group(self, rows: SampleRows, index: np.ndarray, logits_RV: Tensor, table_RC: Tensor) -> "_Group":
        top_k_R, top_p_R, min_p_R = (rows.column(each)[index] for each in (Column.TOP_K, Column.TOP_P, Column.MIN_P))
        found = int(top_k_R.max()), bool((top_p_R < 1).any()), bool((min_p_R > 0).any())
        return _Group(logits_RV, _take(table_RC, index), *found, self._ids)

    def _local_keys(self, kind: Kind, group: "_Group") -> Tensor:
        """Return (R, C) keys of this rank's columns that the other ranks need; C depends on the rows alone."""
        first_id = self._ids.start
        if kind is Kind.GREEDY:
            return best_keys(group.logits_RV, first_id)[:, None]
        if kind is Kind.TOP_K:
            width = min(group.top_k, self._most_columns)
            return torch.cat([top_keys(part.logits_RV, width, first_id) for (part,) in group.parts()])
        found = []
        for (part,) in group.parts():
            scores_RV = part.scores(part.logits_RV, self._steps_V)
            if kind is Kind.FRONT:
                keys_RV, order_RV = part.sorted_keys
                found.append(front_of_sorted(keys_RV, scores_RV.gather(1, order_RV)))
            else:
                place_R1 = scores_RV.argmax(1, keepdim=True)
                found.append(keys_of(part.logits_RV.gather(1, place_R1), place_R1 + first_id))
        return torch.cat(found)

    def _winners(self, kind: Kind, group: "_Group", keys_RC: Tensor, gather: Gather) -> Tensor:
        """Return the keys of the rows' tokens, from the keys of all ranks."""
        if kind is Kind.GREEDY or keys_RC.shape[1] == 1:  # a plain row of one rank: its token is drawn
            return keys_RC.amax(1)
        if kind is Kind.FRONT and self._alone and not group.has_min_p:
            return self._cut(group, keys_RC, logits_and_ids(keys_RC.amax(1, keepdim=True))[0], gather)
        keys_RC = keys_RC.sort(1, descending=True).values
        logits_RC, ids_RC = logits_and_ids(keys_RC)
        scores_RC = group.scores(logits_RC, steps_of(ids_RC))
        if kind is not Kind.PLAIN:
            shares_RC = group.shares(logits_RC, logits_RC[:, :1])
            if kind is Kind.TOP_K:
                places_C = torch.arange(keys_RC.shape[1], device=self._device)
                shares_RC.masked_fill_(places_C >= group[Column.TOP_K], 0.0)
                weights_RC = shares_RC.mul_(WEIGHT).long()
                up_to_RC = weights_RC.cumsum(1)
                kept_RC = group.keeps(up_to_RC - weights_RC, up_to_RC[:, -1:])
                scores_RC.masked_fill_(~kept_RC, -torch.inf)
            else:
                scores_RC.masked_fill_(shares_RC == 0.0, -torch.inf)
                return self._cut(group, front_of_sorted(keys_RC, scores_RC), logits_RC[:, :1], gather)
        return keys_RC.gather(1, scores_RC.argmax(1, keepdim=True))[:, 0]

    def _cut(self, group: "_Group", front_RC: Tensor, best_R1: Tensor, gather: Gather) -> Tensor:
        """Return the key of each front's first token that top_p keeps."""
        if not group.has_top_p:
            return front_RC[:, 0]
        masses_RC = torch.cat([self._masses(*part) for part in group.parts(front_RC, best_R1)])
        masses_RC = torch.stack(list(gather(masses_RC))).sum(0)
        dropped_RC = ~group.keeps(masses_RC[:, :-1], masses_RC[:, -1:])
        place_R1 = dropped_RC.long().cumprod(1).sum(1, keepdim=True)
        return front_RC.gather(1, place_R1.clamp_(max=front_RC.shape[1] - 1))[:, 0]

    def _masses(self, group: "_Group", front_RC: Tensor, best_R1: Tensor) -> Tensor:
        """Return (R, FRONT + 1) int64: of this rank's columns, the mass of the tokens before each of the front, and of all."""
        weights_RV = group.shares(group.logits_RV, best_R1).mul_(WEIGHT).long()
        keys_RV, order_RV = group.sorted_keys
        up_to_RV = torch.nn.functional.pad(weights_RV.gather(1, order_RV).cumsum(1), (1, 0))
        before_RC = up_to_RV.gather(1, torch.searchsorted(-keys_RV, -front_RC))
        return torch.cat([before_RC, weights_RV.sum(1, keepdim=True)], 1)


@dataclass(frozen=True)
class _Group:
    """Rows of logits of one kind, with their parameters."""

    logits_RV: Tensor
    table_RC: Tensor  # float64
    top_k: int  # the largest of the rows
    has_top_p: bool  # True if a row has a top_p below 1
    has_min_p: bool  # True if a row has a min_p above 0
    ids: range  # of the logits' columns

    def __getitem__(self, column: Column) -> Tensor:
        return self.table_RC[:, column, None]

    @cached_property
    def sorted_keys(self) -> tuple[Tensor, Tensor]:
        """Each row's keys, largest first, and their columns: kept, because a front and the masses before it need the same."""
        ids_V = torch.arange(self.ids.start, self.ids.stop, device=self.logits_RV.device)
        return keys_of(self.logits_RV, ids_V).sort(1, descending=True)

    def scores(self, logits: Tensor, steps: Tensor) -> Tensor:
        noise_R1 = self.table_RC.view(torch.int64)[:, Column.NOISE, None]
        return scores_of(logits, steps, self[Column.TEMPERATURE], noise_R1)

    def shares(self, logits: Tensor, best_R1: Tensor) -> Tensor:
        """Return each logit's weight, 1 for ``best_R1``; 0 below min_p. NaN if the best is NaN."""
        # Below exp(-40) a weight is 0; exp of minus infinity takes four times as long on a CPU.
        shares = (logits - best_R1).div_(self[Column.TEMPERATURE].float()).clamp_(min=-40.0).exp_()
        return shares.masked_fill_(shares < self[Column.MIN_P].float(), 0.0)

    def keeps(self, before: Tensor, total_R1: Tensor) -> Tensor:
        """Return True where the tokens before one have not reached top_p: the smallest set with that mass is kept."""
        return before.double() < (self[Column.TOP_P] * total_R1.double()).clamp_(min=1.0)

    def parts(self, *others: Tensor) -> "Iterator[tuple[Any, ...]]":
        """Yield the group in parts whose temporaries are not too large, each with its rows of ``others``; itself if it is small."""
        split = zip(*(x.split(ROWS_AT_ONCE) for x in (self.logits_RV, self.table_RC, *others)), strict=True)
        for logits_RV, table_RC, *rest in split:
            is_whole = len(logits_RV) == len(self.logits_RV)
            yield (self if is_whole else replace(self, logits_RV=logits_RV, table_RC=table_RC), *rest)


def _take(x: Tensor, rows: np.ndarray) -> Tensor:
    """Return these rows; the tensor itself if they are all."""
    return x if len(rows) == len(x) else x[upload(rows, torch.int64, x.device)]


def _put(x_R: Tensor, rows: np.ndarray, values: Tensor | None) -> Tensor:
    """Return ``x_R`` with ``values`` in these rows; the values themselves if they are all."""
    if values is None or len(values) == len(x_R):
        return x_R if values is None else values
    return x_R.index_copy(0, upload(rows, torch.int64, x_R.device), values)
