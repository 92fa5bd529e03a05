"""Captures decode steps as CUDA graphs, one for each number of rows, and replays them with one launch.

A decode step of a large model is hundreds of short kernels, which take longer to launch than to run. A graph records
the launches, including the AllReduces, with fixed tensor addresses, so each step's inputs are copied into the same
tensors. A step of B rows uses the next larger graph; the other rows are padding: no context, slot -1, result ignored.
The plan alone determines the graph, so all ranks use the same one.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger
from tightwire.model.step import Batch, StepArrays, resolve_deferred
from tightwire.model.transfer import overwrite

Replay = Callable[[], Tensor]
# Captures a function's work and returns one that replays it with the current contents of its tensors.
Capture = Callable[[Callable[[], Tensor]], Replay]


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture; at most seven rows of a step are padding."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*sizes, *range(8, max_num_seqs, 8), max_num_seqs)


class DecodeGraphs:
    """Graphs of ``forward`` for each of ``sizes`` rows and each policy, captured by the constructor.

    Cost: about ten milliseconds and a few MB per size and policy; all graphs share one activation pool.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        *,
        sizes: Sequence[int],
        num_policies: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        ledger: Ledger,
    ) -> None:
        self._sizes = sorted(sizes)
        # Largest first, so that the smaller graphs reuse its activation memory in the pool.
        self._graphs = {
            (size, policy): _Graph(forward, size, policy, max_blocks, device, capture, ledger)
            for size in reversed(self._sizes)
            for policy in range(num_policies)
        }

    def fits(self, arrays: StepArrays) -> bool:
        """Return True if a graph covers the step: decode rows only, one per sequence, and few enough."""
        num_rows = len(arrays.token_ids_T)
        return arrays.num_decode_rows == num_rows <= self._sizes[-1] and arrays.has_one_token_each

    def run(self, arrays: StepArrays, policy: int, chosen_R: Tensor | None = None) -> Tensor:
        """Return (B, D) hidden states, valid until the next step. ``chosen_R``: the tokens of the last step."""
        num_rows = len(arrays.token_ids_T)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        return self._graphs[size, policy].run(arrays, chosen_R)[:num_rows]


class _Graph:
    """The graph of one size and policy. Its inputs share one tensor, which one copy fills in each step."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        size: int,
        policy: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        ledger: Ledger,
    ) -> None:
        self._size, self._ledger = size, ledger
        widths = (1, 1, 1, 1, max_blocks)
        self._host = torch.zeros(size * sum(widths), dtype=torch.int32)
        self._device = torch.zeros_like(self._host, device=device)
        lengths = [size * width for width in widths]
        self._fields = [part.numpy() for part in self._host.split(lengths)]
        token_ids, positions, slots, context_lens, tables = self._device.split(lengths)
        batch = Batch(
            token_ids_T=token_ids,
            positions_T=positions,
            slots_T=slots,
            query_start_B1=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens_B=context_lens,
            block_tables_BM=tables.view(size, max_blocks),
            num_decode_rows=size,
            policy=policy,
        )
        self._token_ids_T = token_ids
        self._pad(0)
        overwrite(self._device, self._host)
        forward(batch)  # compiles kernels and allocates workspaces, which is not allowed during capture
        before = {count[:3]: count for count in ledger.counters.counts()}
        self._replay = capture(lambda: forward(batch))
        self._counts = [count.since(before.get(count[:3])) for count in ledger.counters.counts()]

    def run(self, arrays: StepArrays, chosen_R: Tensor | None) -> Tensor:
        num_rows = len(arrays.token_ids_T)
        self._pad(num_rows)
        token_ids, positions, slots, context_lens, tables = self._fields
        token_ids[:num_rows] = arrays.token_ids_T
        positions[:num_rows] = arrays.positions_T
        slots[:num_rows] = arrays.slots_T
        context_lens[:num_rows] = arrays.context_lens_B
        width = arrays.block_tables_BM.shape[1]
        tables.reshape(self._size, -1)[:num_rows, :width] = arrays.block_tables_BM
        overwrite(self._device, self._host)
        if chosen_R is not None:
            self._token_ids_T.copy_(resolve_deferred(self._token_ids_T, chosen_R))
        hidden_TD = self._replay()
        self._ledger.add_replayed(self._counts)
        return hidden_TD

    def _pad(self, first: int) -> None:
        """Set the rows from ``first`` on to padding."""
        for field, padding in zip(self._fields, (0, 0, -1, 0), strict=False):  # tables are not read
            field[first:] = padding


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

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture
