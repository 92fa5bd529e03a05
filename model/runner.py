"""Runs step plans on one rank's model and chooses their tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import Lane, Pending
from tightwire.kernels.transfer import upload
from tightwire.model.decode_graphs import DecodeGraphs
from tightwire.model.decoder import Llama
from tightwire.model.parallel import ChoiceGather
from tightwire.model.prompt_stages import Chunk, Passage, PromptStages
from tightwire.model.sampling.choose import TokenChooser
from tightwire.model.step import Batch, StepArrays, StepPlan, ints, num_deferred, resolve_deferred, split, split_prompts


class ModelRunner:
    """Executes plans in order, the same ones on all ranks of a replica; in every step each replica has one, perhaps empty."""

    def __init__(
        self,
        model: Llama,
        chooser: TokenChooser,
        *,
        graphs: DecodeGraphs | None = None,
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
        self._model, self._chooser, self._graphs, self._lane, self._most_rows = model, chooser, graphs, lane, most_rows
        self.weights, self.cache, self.adapters = model.weights, model.cache, model.adapters
        self.choice_gather, self.lockstep, self.stages = choice_gather, lockstep, stages
        self._device = model.cache.device
        self.note = "" if graphs is None else graphs.note

    def close(self) -> None:
        """Stop the threads that fetch weights, keys and values, and free the graphs, which NCCL waits for. May be called twice."""
        self._graphs = None
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
        # Later policies are the first ones again, with prompts in another way.
        policy = plan.policy % self._model.parallel.num_policies
        parts, first, rows_R = [], 0, ints(plan.logit_rows)
        for part in split(arrays, most_rows=self._most_rows, halve=self._lane is not None):
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

    def _batch(self, arrays: StepArrays, policy: int, chosen_R: Tensor | None, needed_R: np.ndarray | None) -> Batch:
        fields = {name: getattr(arrays, name) for name in arrays.__slots__}
        tensors: dict[str, Any] = {k: self._to_device(x) for k, x in fields.items() if isinstance(x, np.ndarray)}
        if chosen_R is not None:
            tensors["token_ids_T"] = resolve_deferred(tensors["token_ids_T"], chosen_R)
        needed = None
        if needed_R is not None:
            needed = self._to_device(needed_R).long(), int((needed_R < arrays.num_decode_rows).sum())
        return Batch(**tensors, num_decode_rows=arrays.num_decode_rows, policy=policy, needed=needed)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return upload(array, torch.int32, self._device)
