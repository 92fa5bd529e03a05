"""All collectives of the model: tensor parallelism in a replica, and the gather of the tokens of all replicas.

Column-parallel matrices (q, k, v, gate, up) need no communication. Row-parallel matrices (o, down) give every rank a
partial sum, and an AllReduce adds these, twice per layer. The embedding and the head are split over the vocabulary.

Source: Megatron-LM, arXiv 1909.08053, section 3.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, Feedback
from tightwire.comm.collectives.all_gather import all_gather
from tightwire.comm.collectives.deliver import deliver
from tightwire.comm.collectives.one_rank import broadcast, gather_to_root
from tightwire.comm.group.group import Group
from tightwire.comm.lane import Lane, Pending
from tightwire.comm.policy.routes import Routes, kernel_sums
from tightwire.comm.protocols import AllReduce, KernelSums
from tightwire.kernels.packed import embedding
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.layout import Layout
from tightwire.model.step import ints

_INT64_BYTES = 8
BOUNDARY = "stage boundary"  # where a message between stages arises


@dataclass(frozen=True, slots=True)
class RowSums:
    """The AllReduces of one row-parallel matrix for prefill rows and for decode rows; they may be the same object.

    Where one is None the sum of those rows is dropped, and each rank keeps its own part of them.
    """

    label: str  # matrix and layer, for the ledger's trace
    prefill: AllReduce | None
    decode: AllReduce | None

    def keep_dropped(self, update_TD: Tensor, residual_TD: Tensor, num_decode_rows: int) -> "DroppedSum | None":
        """Return the rows of attention's update that were not summed; None if all were. Decode rows come first."""
        start = 0 if self.decode is None else num_decode_rows
        stop = len(update_TD) if self.prefill is None else num_decode_rows
        return None if start >= stop else DroppedSum(slice(start, stop), update_TD, residual_TD)


class DroppedSum:
    """Rows whose sum after attention is dropped: the MLP sees the residual plus this rank's part only.

    After the MLP, the saved residual (equal on all ranks) is restored, and this rank's attention part joins the MLP's
    sum. So the ranks' residuals have equal bits after each layer. Source: SPD, Sync-Point Drop, ICML 2025.
    """

    def __init__(self, rows: slice, update_TD: Tensor, residual_TD: Tensor) -> None:
        self.update_TD = update_TD.clone()  # the MLP overwrites its buffer
        self._rows, self._residual_RD = rows, residual_TD[rows].clone()

    def restore(self, residual_TD: Tensor, partial_TD: Tensor) -> None:
        """After the MLP: restore the residual's rows, and add this rank's part to ``partial_TD``."""
        residual_TD[self._rows] = self._residual_RD
        partial_TD[self._rows] += self.update_TD[self._rows]


class TensorParallel:
    """One rank's shard, group and AllReduces. Each forward pass uses one of ``num_policies`` sets of AllReduces."""

    def __init__(
        self, group: Group, layout: Layout, routes: Routes | None, sum_dtype: torch.dtype | None = None
    ) -> None:
        """``routes``: None for a single rank. ``sum_dtype``: dtype in which partial sums are sent; None keeps their own."""
        self.shard, self.num_ranks = layout.shards[group.rank], group.world_size
        self.sum_dtype, self._group, self._routes = sum_dtype, group, routes
        self.num_policies = 1 if routes is None else len(routes.policies)
        self._embedding_sums = [
            None if routes is None else routes.all_reduce("embed", 0, "prefill", policy)
            for policy in range(self.num_policies)
        ]

    def row_sums(self, site: str, layer: int, policy: int = 0) -> RowSums | None:
        """Return the AllReduces of ``site``'s matrix in ``layer``, for ``sum_rows``; None for one rank."""
        if (routes := self._routes) is None:
            return None
        places = [(site, layer, phase, policy) for phase in ("prefill", "decode")]
        sums = [None if routes.drops(*place) else routes.all_reduce(*place) for place in places]
        return RowSums(f"{site} {layer}", *sums)

    def embed(self, local_table_VD: Matrix, token_ids_T: Tensor, policy: int, phase: str, dtype: torch.dtype) -> Tensor:
        """Return (T, D) embeddings in ``dtype``. One rank has each token's row; the others add exact zeros."""
        embedding_sum = self._embedding_sums[policy]
        if embedding_sum is None:
            return embedding(token_ids_T, local_table_VD, dtype)
        rows = self.shard.vocab_rows
        mine_T = (token_ids_T >= rows.start) & (token_ids_T < rows.stop)
        local_ids_T = torch.where(mine_T, token_ids_T - rows.start, 0)
        local_TD = embedding(local_ids_T, local_table_VD, self.sum_dtype or dtype).mul_(mine_T.unsqueeze(-1))
        return embedding_sum(local_TD, phase, "embed").to(dtype)

    @torch.inference_mode()
    def last_chosen(self, chosen_R: Tensor | None, num: int, phase: str = "") -> Tensor:
        """Return on every rank the first ``num`` of the tokens that rank 0 chose after the last step.

        ``chosen_R``: (R,) int32 on rank 0, ignored elsewhere; ValueError if it has fewer. Cost: rank 0 sends 4 num bytes
        to each of the W - 1 other ranks.
        """
        if self._group.rank != 0:
            chosen_R = torch.empty(num, dtype=torch.int32, device=self._group.device)
        elif chosen_R is None or len(chosen_R) < num:
            given = "none" if chosen_R is None else len(chosen_R)
            raise ValueError(f"the plan has {num} deferred tokens, but the last step chose {given}")
        return broadcast(self._group, chosen_R[:num], phase=phase, site="chosen")

    @torch.inference_mode()
    def share_rows(self, rows_RD: Tensor | None, shape: tuple[int, int], root: int, phase: str, site: str) -> Tensor:
        """Return on every rank (R, D) float32 hidden states that ``root`` has. Cost: it sends 4 R D bytes to each other."""
        if rows_RD is None:
            rows_RD = torch.empty(shape, dtype=torch.float32, device=self._group.device)
        return broadcast(self._group, rows_RD, root, phase=phase, site=site)

    def sum_rows(
        self, partial_TD: Tensor, sums: RowSums | None, feedback: Feedback | None = None, *, num_decode_rows: int
    ) -> Tensor:
        """Return (T, D), the sum of the ranks' partial results, in their dtype. Messages are of ``sum_dtype``.

        ``feedback``: rounding errors that this pass carries from sum to sum of these rows. Decode rows come first. If
        they and the others use different algorithms, they are summed separately, so a row's bits do not depend on the
        kind of the other rows. The ledger counts a sum over any prefill row as prefill.
        """
        if sums is None:
            return partial_TD
        if num_decode_rows == len(partial_TD):
            return self._sum(sums.decode, partial_TD, "decode", sums.label, feedback)
        if num_decode_rows == 0 or sums.prefill is sums.decode:
            return self._sum(sums.prefill, partial_TD, "prefill", sums.label, feedback)
        decode_TD = self._sum(sums.decode, partial_TD[:num_decode_rows], "decode", sums.label, feedback)
        prefill_TD = self._sum(sums.prefill, partial_TD[num_decode_rows:], "prefill", sums.label, feedback)
        return torch.cat([decode_TD, prefill_TD])

    def sum_small(self, x: Tensor, site: str, phase: str) -> Tensor:
        """Return the exact sum of all ranks' small tensors, in the ranks' order. Cost: W - 1 times its bytes a rank."""
        return torch.stack(all_gather(self._group, x.contiguous(), phase=phase, site=site)).sum(0)

    def _sum(
        self, all_reduce: AllReduce | None, partial_TD: Tensor, phase: str, label: str, feedback: Feedback | None
    ) -> Tensor:
        if all_reduce is None:
            return partial_TD
        message_TD = partial_TD.to(self.sum_dtype or partial_TD.dtype)
        return all_reduce(message_TD, phase, label, feedback).to(partial_TD.dtype)

    def sums_in_kernel(self, all_reduces: Iterable[AllReduce | None], rows_TD: Tensor) -> KernelSums | None:
        """Return the arguments for these sums of ``rows_TD`` inside one kernel; None if one of them is not possible."""
        if self.sum_dtype not in (None, rows_TD.dtype):
            return None
        found = {
            None if all_reduce is None else kernel_sums(all_reduce, rows_TD.numel(), rows_TD.element_size())
            for all_reduce in all_reduces
        }
        return found.pop() if len(found) == 1 else None

    def gather_choices(self, x: Tensor, phase: str) -> list[Tensor]:
        """Return all ranks' ``x``, which choose tokens, in rank order. Cost: W - 1 times its bytes a rank."""
        return all_gather(self._group, x.contiguous(), phase=phase, site="logits")


class ChoiceGather:
    """Gathers the tokens of all replicas on rank 0, which tells them to the clients."""

    def __init__(self, world: Group, num_places: int) -> None:
        """``world``: the ranks of all replicas, grouped by replica, ``num_places`` in each."""
        self._world, self._num_places = world, num_places
        self.num_begun = 0  # number of gathers started
        self.waited_s = 0.0  # time in gathers, for the slowest rank and for the transfer

    def gather(self, sizes: bytes, results: Tensor | None, phase: str = "") -> Tensor | None:
        """Return the results of all replicas on rank 0, one after the other; None elsewhere.

        ``sizes``: the plan's ``gather_sizes``. ``results``: int64, the same on all ranks of a replica; None without rows. Cost: each
        rank but 0 sends the largest replica's bytes.
        """
        self.num_begun += 1
        is_first = self._world.rank % self._num_places == 0
        places, all_sizes = range(self._num_places), ints(sizes).tolist()  # no NumPy number: counts of bytes are sent
        num_bytes = [_INT64_BYTES * size if place == 0 else 0 for size in all_sizes for place in places]
        nothing = torch.empty(0, dtype=torch.int64, device=self._world.device)
        own = results if results is not None and is_first else nothing
        start_s = time.perf_counter()
        received = gather_to_root(self._world, own.view(torch.uint8), num_bytes, phase=phase, site="logits")
        self.waited_s += time.perf_counter() - start_s
        return None if received is None else torch.cat(received).view(torch.int64)


class SideWire:
    """Moves KV heads and chosen tokens between the stages, in a thread beside computing, so that they delay no hidden states.

    ``group``: of CPU ranks, with connections and a ledger of its own; all of its ranks call the same methods in the same order.
    ``device``: of the tensors; those of a GPU are copied to the host, and there.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self._lane = group, Lane("beside", device, ledger=group.ledger)
        self.close = self._lane.close

    def send_chosen(self, results: Tensor | None, num: int, phase: str) -> Pending:
        """Send the last rank's ``results``, (num,) int64, to the first, which gets them on the host; others get an empty tensor."""
        last, ranks = self.group.world_size - 1, range(self.group.world_size)
        sizes = [_INT64_BYTES * num if (self.group.rank, rank) == (0, last) else 0 for rank in ranks]

        def move() -> Tensor:
            own = (torch.empty(0) if results is None else results.to(self.group.device)).view(torch.uint8)
            parts = [own if rank == 0 else own[:0] for rank in ranks]
            received = deliver(self.group, "token-ids", parts, sizes, phase=phase, site=BOUNDARY)
            return torch.cat(received).view(torch.int64)

        return self._lane.start(move)

    def hand_over(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> Pending:
        """Send each other rank the keys and values that it decodes with, as bytes; the result is theirs, concatenated."""
        move = partial(deliver, self.group, "kv-heads", parts, recv_bytes, phase="prefill", site=BOUNDARY)
        return self._lane.start(lambda: torch.cat(move()))


class StageWire:
    """Moves hidden states between the stages, in a thread beside computing. ``group``: the first rank of each, in order; see ``SideWire``."""

    def __init__(self, group: Group, device: torch.device, codec: Codec, dtype: torch.dtype) -> None:
        """``dtype``: of hidden states without a codec, which encodes on the device."""
        self.group, self._codec, self._dtype, self._device = group, codec, dtype, device
        self._lane = Lane("stages", device, ledger=group.ledger)
        self.close = self._lane.close

    def send_on(self, own_TD: Tensor | None, recv_shape: tuple[int, int] | None, phase: str) -> Pending:
        """Send hidden states to the next stage; the result is those of the stage before, (T, D).

        None: nothing to send, or to receive; the result is then empty. Cost: the codec's bytes.
        """
        rank, ranks = self.group.rank, range(self.group.world_size)
        own = own_TD if own_TD is None else own_TD.contiguous()  # the caller computes on, with other memory

        def move() -> Tensor:
            ledger, codec = self.group.ledger, self._codec
            with ledger.coding_if(not codec.exact):
                encoded = torch.empty(0, dtype=torch.uint8) if own is None else codec.encode(own.view(-1))
                encoded = encoded.to(self.group.device)
            num_bytes = 0 if recv_shape is None else codec.wire_bytes(math.prod(recv_shape), self._dtype.itemsize)
            parts = [encoded if peer == rank + 1 else encoded[:0] for peer in ranks]
            sizes = [num_bytes if peer == rank - 1 else 0 for peer in ranks]
            received = deliver(self.group, "hidden-state", parts, sizes, phase=phase, site=BOUNDARY)
            if recv_shape is None:
                return torch.empty(0)
            with ledger.coding_if(not codec.exact):
                buf = received[rank - 1].to(self._device)
                return codec.decode(buf, math.prod(recv_shape), self._dtype).view(recv_shape)

        return self._lane.start(move)
