"""Decode steps as CUDA graphs."""

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger
from tightwire.kernels.transfer import overwrite
from tightwire.model.step import Batch, StepArrays, num_deferred

_TIMED_REPLAYS = 6  # of each form, as many on all ranks, because a replay sums over them; the first is not timed
_FASTER = 0.98  # of the other form's time: a text's bits depend on the form, so it should not change with each start
Replay = Callable[[], Tensor]
# Captures a function's work and returns one that replays it with the current contents of its tensors.
Capture = Callable[[Callable[[], Tensor]], Replay]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture; at most seven rows of a step are padding."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*sizes, *range(8, max_num_seqs, 8), max_num_seqs)


class DecodeGraphs:
    """Graphs of ``forward`` for each of ``sizes`` rows and each policy, captured by the constructor.

    With ``has_adapters`` there are twice as many: steps without adapters replay graphs without their kernels.
    ``have_head``: ``forward`` returns logits; else hidden states.

    A decode step of a large model is hundreds of short kernels, which take longer to launch than to run. A graph records
    the launches, including the AllReduces, with fixed tensor addresses, so each step's inputs are copied into the same
    tensors. A step of B rows uses the next larger graph; the other rows are padding: no context, slot -1, result ignored.
    The plan alone determines the graph, so all ranks use the same one.

    With ``fuses`` there are two forms for one row, and the constructor keeps that with ``Batch.fuses`` if it is clearly faster, for
    all policies. Each rank chooses for itself: its part of a sum is the same but for rounding, and the sum is the same on all ranks.

    Cost: about ten milliseconds and a few MB per size and policy; all graphs share one activation pool, also for results.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        *,
        sizes: Sequence[int],
        num_policies: int,
        num_groups: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        ledger: Ledger,
        has_adapters: bool = False,
        have_head: bool = False,
        fuses: bool = False,
    ) -> None:
        self._sizes, self.have_head = sorted(sizes), have_head
        self.note = ""  # which form of a step of one row is faster
        given = forward, (num_groups, max_blocks, self._sizes[-1]), device, capture, ledger
        # Largest first, so that the smaller graphs reuse its activation memory in the pool.
        self._graphs = {
            (size, policy, adapted): _Graph((size, policy, adapted), fuses and size == 1 and not adapted, *given)
            for size in reversed(self._sizes)
            for policy in range(num_policies)
            for adapted in ((False, True) if has_adapters else (False,))
        }
        if fuses and self._sizes[0] == 1:
            graphs = [self._graphs[1, policy, False] for policy in range(num_policies)]
            apart_s, fused_s = _times_s(graphs[0].forms)
            is_faster = fused_s < _FASTER * apart_s
            for graph in graphs:
                graph.forms = [graph.forms[is_faster]]
            kept = "in kernels of products" if is_faster else "in their own kernels"
            times = f"{1000 * fused_s:.2f} ms a step in those of products, {1000 * apart_s:.2f} in their own"
            self.note = f"one row: norms, rotations and SwiGLU {kept}; {times}"

    def fits(self, arrays: StepArrays) -> bool:
        """Return True if a graph covers the step: decode rows only, one per sequence, and few enough, as in the last step."""
        num_rows, most = len(arrays.token_ids_T), self._sizes[-1]
        is_decode = arrays.num_decode_rows == num_rows == len(arrays.context_lens_B)
        return is_decode and num_rows <= most and num_deferred(arrays.token_ids_T) <= most

    def run(self, arrays: StepArrays, policy: int, chosen_R: Tensor | None = None) -> Tensor:
        """Return (B, D) hidden states or (B, V) logits, valid until the next step. ``chosen_R``: the tokens of the last step."""
        num_rows = len(arrays.token_ids_T)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        return self._graphs[size, policy, arrays.adapters_T is not None].run(arrays, chosen_R)[:num_rows]


class _Graph:
    """The graph of one size and policy. Its inputs but the tables share one tensor, which one copy fills in each step.

    Of the tables a step copies what its contexts use, if they are not those of this graph's last step.
    """

    def __init__(
        self,
        kind: tuple[int, int, bool],
        fuses: bool,
        forward: Callable[[Batch], Tensor],
        most: tuple[int, int, int],
        device: torch.device,
        capture: Capture,
        ledger: Ledger,
    ) -> None:
        """``kind``: rows, policy, and True if rows have adapters. ``fuses``: try both forms. ``most``: groups, blocks, chosen tokens."""
        (size, policy, adapted), (num_groups, max_blocks, most_chosen) = kind, most
        self._size, self._ledger = size, ledger
        lengths = [size * width for width in (1, 1, 1, num_groups, 1, 1)]
        self._host = torch.zeros(sum(lengths), dtype=torch.int32)
        self._fields = [part.numpy() for part in self._host.split(lengths)]
        # The last step's tokens lie before the plan's, so that one index finds a row's among both.
        numbers = torch.zeros(most_chosen + len(self._host), dtype=torch.int32, device=device)
        self._chosen, self._device = numbers.split([most_chosen, len(self._host)])
        self._places = np.arange(most_chosen, most_chosen + size)  # of the plan's tokens
        given, sources, positions, slots, context_lens, adapters = self._device.split(lengths)
        known = numbers[: most_chosen + size]
        tables_LBM = torch.zeros(num_groups, size, max_blocks, dtype=torch.int32, device=device)
        self._copied_LBM = torch.empty(0, dtype=torch.int32)  # what the first rows and columns of the tables are now
        self._batch = batch = Batch(  # kept: the graph reads its tensors at their addresses
            token_ids_T=torch.zeros_like(given),
            positions_T=positions,
            slots_LT=slots.view(num_groups, size),
            query_start_B1=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens_B=context_lens,
            block_tables_LBM=tables_LBM,
            num_decode_rows=size,
            policy=policy,
            adapters_T=adapters if adapted else None,
        )
        self._pad(0)
        overwrite(self._device, self._host)

        def run(batch: Batch) -> Tensor:
            torch.index_select(known, 0, sources, out=batch.token_ids_T).clamp_(min=0)
            return forward(batch)

        run(batch)  # compiles kernels and allocates workspaces, which is not allowed during capture
        before = {count[:3]: count for count in ledger.counters.counts()}
        self.forms = [capture(partial(run, batch))]  # the first is replayed
        self._counts = [count.since(before.get(count[:3])) for count in ledger.counters.counts()]
        if fuses:
            run(fused := replace(batch, fuses=True))
            self.forms.append(capture(partial(run, fused)))

    def run(self, arrays: StepArrays, chosen_R: Tensor | None) -> Tensor:
        num_rows = len(arrays.token_ids_T)
        self._pad(num_rows)
        token_ids, sources, positions, slots, context_lens, adapters = self._fields
        token_ids[:num_rows] = arrays.token_ids_T
        sources[:num_rows] = np.where(arrays.token_ids_T < 0, -1 - arrays.token_ids_T, self._places[:num_rows])
        positions[:num_rows] = arrays.positions_T
        slots.reshape(-1, self._size)[:, :num_rows] = arrays.slots_LT
        context_lens[:num_rows] = arrays.context_lens_B
        if arrays.adapters_T is not None:
            adapters[:num_rows] = arrays.adapters_T
        overwrite(self._device, self._host)
        if not np.array_equal(self._copied_LBM.numpy(), arrays.block_tables_LBM):
            self._copied_LBM = torch.from_numpy(arrays.block_tables_LBM.copy())
            width = self._copied_LBM.shape[2]
            overwrite(self._batch.block_tables_LBM[:, :num_rows, :width], self._copied_LBM)
        if chosen_R is not None:
            self._chosen[: len(chosen_R)] = chosen_R
        rows_TX = self.forms[0]()
        self._ledger.add_replayed(self._counts)
        return rows_TX

    def _pad(self, first: int) -> None:
        """Set the rows from ``first`` on to padding."""
        for field, padding in zip(self._fields, (0, self._places[first:], 0, -1, 0, -1), strict=True):
            field[first:] = padding


def _times_s(forms: Sequence[Replay]) -> list[float]:
    """Seconds of the fastest of a few replays of each form, in turn."""
    times_s = [[0.0] * len(forms) for _ in range(_TIMED_REPLAYS)]
    for taken_s in times_s:
        for number, replay in enumerate(forms):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            replay()
            torch.cuda.synchronize()
            taken_s[number] = time.perf_counter() - start_s
    return [min(each) for each in zip(*times_s[1:], strict=True)]


def cuda_capture(pool: Any) -> Capture:
    """Return a ``Capture`` whose graphs share ``pool``; it raises RuntimeError if a capture or the memory fails."""

    def capture(run: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=pool):
                result = run()
        except RuntimeError as error:
            raise RuntimeError(
                f"a decode step could not be captured as a CUDA graph; --no-cuda-graphs turns graphs off: {error}"
            ) from error
        # Not that tensor: its memory is the pool's again, because the results of all sizes would take hundreds of MB.
        at = SimpleNamespace(__cuda_array_interface__=result.view(torch.uint8).__cuda_array_interface__)
        result = torch.as_tensor(at, device=result.device).view(result.dtype)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture
