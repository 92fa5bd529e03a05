"""Runs step plans on one rank's model and chooses their tokens; on CUDA, decode steps as graphs."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import Lane, Pending
from tightwire.comm.ledger.ledger import Ledger
from tightwire.kernels.transfer import overwrite, upload
from tightwire.model.decoder import Llama
from tightwire.model.parallel import ChoiceGather
from tightwire.model.prompt_stages import Chunk, Passage, PromptStages
from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.step import (
    Batch,
    StepArrays,
    StepPlan,
    cut,
    cut_row,
    cut_up,
    ints,
    num_deferred,
    resolve_deferred,
    split_prompts,
)


class ModelRunner:
    """Executes plans in order, the same ones on all ranks of a replica; in every step each replica has one, perhaps empty."""

    def __init__(
        self,
        model: Llama,
        chooser: TokenChooser,
        *,
        graphs: "DecodeGraphs | None" = None,
        lane: Lane | None = None,
        most_rows: int | None = None,
        choice_gather: ChoiceGather | None = None,
        lockstep: bool = False,
        stages: PromptStages | Passage | None = None,
    ) -> None:
        """
        Args:
            graphs: replayed for the steps that fit one; None: every step runs kernel by kernel.
            lane: sums one half of a prefill step while the other is computed; None: steps are not halved.
            most_rows: prefill steps with more rows are computed in parts; None: always in one part.
            choice_gather: gathers from all replicas; None: there is one replica.
            stages: prompts pass them, or with ``Passage`` all rows; None: all ranks compute prompts together.
            lockstep: all replicas stream weights together, so a replica with an empty plan fetches the layers too.
        """
        self._model, self._chooser, self._graphs, self._lane = model, chooser, graphs, lane
        self._most_rows = most_rows
        self.weights, self.cache, self.adapters = model.weights, model.cache, model.adapters
        self.choice_gather, self.lockstep, self.stages = choice_gather, lockstep, stages
        self._device = model.cache.device

    def close(self) -> None:
        """Stop the threads that fetch weights, keys and values. May be called twice."""
        self.weights.close()
        self.cache.close()
        if self.stages is not None:
            self.stages.close()

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        """Run one forward pass; on CUDA the host does not wait for it.

        ``chosen_R``: on rank 0, the tokens (R,) int32 chosen after the last step, if the plan has deferred tokens.
        Returns this rank's columns of the logits of ``plan.logit_rows``, (R, local_V) float32; None when R is 0.
        """
        if isinstance(self.stages, PromptStages):
            return self._execute_staged(plan, self.stages)
        rows_R, passage, gives_logits = ints(plan.logit_rows), self.stages, False
        if passage is not None:
            rows_TX = self._run_stage(plan, passage, rows_R)
        else:
            rows_TX, gives_logits = self._run_layers(plan, chosen_R)
        if rows_TX is None or not len(rows_R):
            return None
        if not np.array_equal(rows_R, np.arange(len(rows_TX))):
            rows_TX = rows_TX[self._to_device(rows_R)]
        return rows_TX if gives_logits else self._model.logits(rows_TX)

    def choose(self, plan: StepPlan, logits_RV: Tensor | None, banned: bytes = b"") -> Tensor | Pending | None:
        """Choose the tokens of a plan that was executed, together with the other ranks; returns ``TokenChooser.choose``'s results.

        ``banned``: of the plan's masked rows. With ``plan.gather_sizes`` rank 0 gets the results of all replicas, and others
        None; None too when there are no rows. In a pipeline the last rank chooses, and the first gets the results when they come.
        """
        results, passage = None, self.stages if isinstance(self.stages, Passage) else None
        if logits_RV is not None and plan.logit_rows and (passage is None or passage.is_last):
            results = self._chooser.choose(logits_RV, plan.sampling, banned, plan.phase)
        if passage is not None and plan.logit_rows:
            wire = passage.beside  # None on ranks that are not the first of their stage
            return None if wire is None else wire.send_chosen(results, plan.sampling.num_results, plan.phase)
        if not plan.gather_sizes:
            return results
        assert self.choice_gather is not None, "a plan of several replicas, and there is one"
        return self.choice_gather.gather(plan.gather_sizes, results, plan.phase)

    def _run_layers(self, plan: StepPlan, chosen_R: Tensor | None) -> tuple[Tensor | None, bool]:
        """Return ``_run_arrays``'s results; None if the plan has no tokens."""
        if not plan.token_ids:
            for span in self.weights.spans if self.lockstep else ():  # fetch and release every layer without computing
                for index in span:
                    self.weights.layer(index)
                for index in span:
                    self.weights.release(index)
            return None, False
        return self._run_arrays(StepArrays.from_plan(plan, self.cache.block_size, self.cache.groups), plan, chosen_R)

    def _run_arrays(self, step: StepArrays, plan: StepPlan, chosen_R: Tensor | None) -> tuple[Tensor, bool]:
        """Return (T, D) after the last layer and False, or from a graph that has the head the logits (T, local_V) and True."""
        arrays = self.cache.begin(step)
        num_chosen = num_deferred(arrays.token_ids_T)
        chosen_R = self._model.parallel.last_chosen(chosen_R, num_chosen, plan.phase) if num_chosen else None
        if self._graphs is not None and self._graphs.fits(arrays):
            return self._graphs.run(arrays, plan.policy, chosen_R), self._graphs.have_head
        policy = plan.policy % self._model.num_policies  # later ones are these again, with prompts in another way
        parts, first, rows_R = [], 0, ints(plan.logit_rows)
        for part in self._parts(arrays):
            own_R = rows_R[(rows_R >= first) & (rows_R < first + len(part.token_ids_T))] - first
            parts.append(self._batch(part, policy, chosen_R, own_R))
            first += len(part.token_ids_T)
        return self._model.forward(*parts, lane=self._lane if len(parts) > 1 else None), False

    def _execute_staged(self, plan: StepPlan, stages: PromptStages) -> Tensor | None:
        """Compute decode rows with all ranks and this rank's chunk of prompt rows; results are those of ``execute``."""
        together = StepArrays.from_plan(plan, self.cache.block_size, self.cache.groups) if plan.token_ids else None
        entering = None
        if plan.staged and together is not None:
            together, entering = split_prompts(together)
        stages.begin(plan, entering)
        hidden_TD = None if together is None else self._run_arrays(together, plan, None)[0]
        rows_R, num_rows = ints(plan.logit_rows), 0 if together is None else len(together.token_ids_T)
        leaving_R = rows_R[rows_R >= num_rows] - num_rows
        leaving_TD = stages.run(lambda arrays: self._batch(arrays, 0, None, leaving_R if stages.is_last else None))
        if not len(rows_R):
            return None
        parts = []
        if hidden_TD is not None and len(rows_R) > len(leaving_R):
            parts.append(hidden_TD[self._to_device(rows_R[rows_R < num_rows])])
        if len(leaving_R):
            own_RD = None if leaving_TD is None else leaving_TD[self._to_device(leaving_R)]
            shape, parallel = (len(leaving_R), self._model.hidden_size), self._model.parallel
            parts.append(parallel.share_rows(own_RD, shape, parallel.num_ranks - 1, "prefill", "last stage"))
        return self._model.logits(torch.cat(parts))

    def _run_stage(self, plan: StepPlan, passage: Passage, rows_R: np.ndarray) -> Tensor | None:
        """Compute the layers of this rank's stage for the rows of an earlier plan, which have reached it; return the last stage's."""
        entering = None
        if plan.token_ids:
            arrays = StepArrays.from_plan(plan, self.cache.block_size, self.cache.groups)
            entering = Chunk(plan.index, plan.policy, arrays)
        chunk, hidden_TD = passage.advance(entering), None
        if chunk is not None:
            before_TD = passage.arrived()
            if self._graphs is not None and self._graphs.fits(chunk.arrays):
                if before_TD is not None and self._model.before_TD is not None:
                    self._model.before_TD[: chunk.num_rows] = before_TD
                hidden_TD = self._graphs.run(chunk.arrays, chunk.policy).clone()  # sent while the next step is replayed
            else:
                batch = self._batch(chunk.arrays, chunk.policy, None, rows_R if passage.is_last else None)
                hidden_TD = self._model.forward(replace(batch, hidden_TD=before_TD))
        passage.send_on(hidden_TD)
        return hidden_TD if passage.is_last else None

    def _parts(self, arrays: StepArrays) -> Sequence[StepArrays]:
        """Return the step, or its parts: of at most ``most_rows`` rows, or two halves for the lane."""
        num_rows, num_decode_rows = len(arrays.token_ids_T), arrays.num_decode_rows
        if self._most_rows is not None and num_rows > max(self._most_rows, num_decode_rows):
            return cut_up(arrays, self._most_rows)
        if self._lane is not None and (row := cut_row(num_rows, num_decode_rows)):
            return cut(arrays, row)
        return [arrays]

    def _batch(self, arrays: StepArrays, policy: int, chosen_R: Tensor | None, needed_R: np.ndarray | None) -> Batch:
        tensors = {
            name: self._to_device(array)
            for name in arrays.__slots__
            if isinstance(array := getattr(arrays, name), np.ndarray)
        }
        if chosen_R is not None:
            tensors["token_ids_T"] = resolve_deferred(tensors["token_ids_T"], chosen_R)
        needed = None
        if needed_R is not None:
            needed = self._to_device(needed_R).long(), int((needed_R < arrays.num_decode_rows).sum())
        return Batch(**tensors, num_decode_rows=arrays.num_decode_rows, policy=policy, needed=needed)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return upload(array, torch.int32, self._device)


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
    ) -> None:
        self._sizes, self.have_head = sorted(sizes), have_head
        # Largest first, so that the smaller graphs reuse its activation memory in the pool.
        self._graphs = {
            (size, policy, adapted): _Graph(
                forward, (size, policy, adapted), (num_groups, max_blocks, self._sizes[-1]), device, capture, ledger
            )
            for size in reversed(self._sizes)
            for policy in range(num_policies)
            for adapted in ((False, True) if has_adapters else (False,))
        }

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
        forward: Callable[[Batch], Tensor],
        kind: tuple[int, int, bool],
        most: tuple[int, int, int],
        device: torch.device,
        capture: Capture,
        ledger: Ledger,
    ) -> None:
        """``kind``: the number of rows, the policy, and True if rows have adapters. ``most``: groups, blocks, chosen tokens."""
        size, policy, adapted = kind
        num_groups, max_blocks, most_chosen = most
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

        def run() -> Tensor:
            torch.index_select(known, 0, sources, out=batch.token_ids_T).clamp_(min=0)
            return forward(batch)

        run()  # compiles kernels and allocates workspaces, which is not allowed during capture
        before = {count[:3]: count for count in ledger.counters.counts()}
        self._replay = capture(run)
        self._counts = [count.since(before.get(count[:3])) for count in ledger.counters.counts()]

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
        rows_TX = self._replay()
        self._ledger.add_replayed(self._counts)
        return rows_TX

    def _pad(self, first: int) -> None:
        """Set the rows from ``first`` on to padding."""
        for field, padding in zip(self._fields, (0, self._places[first:], 0, -1, 0, -1), strict=True):
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
        # Not that tensor: its memory is the pool's again, because the results of all sizes would take hundreds of MB.
        at = SimpleNamespace(__cuda_array_interface__=result.view(torch.uint8).__cuda_array_interface__)
        result = torch.as_tensor(at, device=result.device).view(result.dtype)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture
