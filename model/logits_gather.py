"""Gathers the logits of data-parallel replicas on rank 0, which chooses tokens for every sequence.

A replica is a whole model, split over its own tensor-parallel group. In a step each replica runs its own plan. Then
every rank sends rank 0 its columns of the replica's rows, or only the largest few if those suffice
(``sampling.candidates``). Rank 0 concatenates the rows of all replicas.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.comm.codec.slices import as_bytes
from tightwire.comm.collectives.collectives import gather_to_root
from tightwire.comm.group.group import Group
from tightwire.model.layout import Layout
from tightwire.model.sampling.candidates import KEY_BYTES, best_candidates, candidates_pay, scatter_candidates
from tightwire.model.step import ints

_FLOAT_BYTES = 4


class _Rows(NamedTuple):
    """One replica's rows of logits in a step."""

    num_rows: int
    num_candidates: int  # 0: all logits


class LogitsGather:
    """One rank's side of the gather."""

    def __init__(self, world: Group, layout: Layout) -> None:
        """``world``: the ranks of all replicas, grouped by replica, in the layout's order within each."""
        self._world = world
        self._vocab_rows = [shard.vocab_rows for shard in layout.shards]
        self._replica, self._place = divmod(world.rank, len(self._vocab_rows))
        self._sizes = [len(rows) for rows in self._vocab_rows]
        self.num_begun = 0  # number of gathers started
        self.waited_s = 0.0  # time in gathers, for the slowest rank and for the transfer

    def gather(self, sizes: bytes, local_RV: Tensor | None, phase: str = "") -> Tensor | None:
        """Return (R, V) float32 on rank 0, in the order of the replicas; None elsewhere.

        Args:
            sizes: the plan's ``gather_sizes``.
            local_RV: this rank's columns of its replica's rows; None without rows.
            phase: of the step, for the ledger.
        Raises:
            PeerLostError: a rank is gone.
        Cost: each rank but 0 sends the largest of all ranks' messages: 4 R local_V bytes, or 8 R num_candidates.
        """
        replicas = [_Rows(*pair) for pair in ints(sizes).reshape(-1, 2).tolist()]
        self.num_begun += 1
        message_bytes = [
            self._message_bytes(replica, place) for replica in replicas for place in range(len(self._sizes))
        ]
        message, start_s = self._message(local_RV, replicas[self._replica]), time.perf_counter()
        received = gather_to_root(self._world, message, message_bytes, phase=phase, site="logits")
        self.waited_s += time.perf_counter() - start_s
        if received is None:
            return None
        num_places = len(self._sizes)
        rows = [
            self._joined(received[d * num_places : (d + 1) * num_places], replica)
            for d, replica in enumerate(replicas)
            if replica.num_rows
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _message_bytes(self, replica: _Rows, place: int) -> int:
        if candidates_pay(replica.num_candidates, self._sizes):
            return KEY_BYTES * replica.num_rows * replica.num_candidates
        return _FLOAT_BYTES * replica.num_rows * self._sizes[place]

    def _message(self, local_RV: Tensor | None, replica: _Rows) -> Tensor:
        if local_RV is None:
            return torch.empty(0, dtype=torch.uint8, device=self._world.device)
        if candidates_pay(replica.num_candidates, self._sizes):
            first_id = self._vocab_rows[self._place].start
            return as_bytes(best_candidates(local_RV, replica.num_candidates, first_id).contiguous().view(-1))
        return as_bytes(local_RV.contiguous().view(-1))

    def _joined(self, messages: Sequence[Tensor], replica: _Rows) -> Tensor:
        """Return one replica's rows from its ranks' messages."""
        if candidates_pay(replica.num_candidates, self._sizes):
            keys = [message.view(torch.int64).view(replica.num_rows, -1) for message in messages]
            return scatter_candidates(torch.cat(keys, dim=1), self._vocab_rows[-1].stop)
        parts = [message.view(torch.float32).view(replica.num_rows, -1) for message in messages]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
