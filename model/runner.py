"""Runs step plans on one rank's model and returns the logits on rank 0."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import Lane
from tightwire.model.decode_graphs import DecodeGraphs
from tightwire.model.llama import Llama
from tightwire.model.parallel import LogitsGather
from tightwire.model.step import Batch, StepArrays, StepPlan, cut, cut_row, cut_up, ints, num_deferred, resolve_deferred
from tightwire.model.transfer import upload


class ModelRunner:
    """Executes plans in order, the same ones on all ranks of a replica; in every step each replica has one, perhaps empty."""

    def __init__(
        self,
        model: Llama,
        *,
        graphs: DecodeGraphs | None = None,
        lane: Lane | None = None,
        most_rows: int | None = None,
        logits_gather: LogitsGather | None = None,
        lockstep: bool = False,
    ) -> None:
        """
        Args:
            graphs: replayed for the steps that fit one; None: every step runs kernel by kernel.
            lane: sums one half of a prefill step while the other is computed; None: steps are not halved.
            most_rows: prefill steps with more rows are computed in parts; None: always in one part.
            logits_gather: gathers from all replicas; None: there is one replica.
            lockstep: all replicas stream weights together, so a replica with an empty plan fetches the layers too.
        """
        self._model, self._graphs, self._lane = model, graphs, lane
        self._most_rows = most_rows
        self.weights, self.cache = model.weights, model.cache
        self.logits_gather, self.lockstep = logits_gather, lockstep
        self._device = model.cache.device

    def close(self) -> None:
        """Stop the threads that fetch weights, keys and values. May be called twice."""
        self.weights.close()
        self.cache.close()

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        """Run one forward pass; on CUDA the host does not wait for it.

        Args:
            chosen_R: on rank 0, the tokens (R,) int32 chosen after the last step, if the plan has deferred tokens.
        Returns:
            Logits (R, V) float32 of ``plan.logit_rows`` on rank 0; None on other ranks, and when R is 0. With
            ``plan.num_candidates`` all but the largest may be minus infinity. With ``plan.gather_sizes`` the rows are
            those of all replicas.
        """
        hidden_TD = self._run_layers(plan, chosen_R)
        rows_R = ints(plan.logit_rows)
        if plan.gather_sizes:
            assert self.logits_gather is not None, "a plan of several replicas, and there is one"
            local_RV = None
            if hidden_TD is not None and len(rows_R):
                local_RV = self._model.local_logits(hidden_TD[self._to_device(rows_R)])
            return self.logits_gather.gather(plan.gather_sizes, local_RV, plan.phase)
        if hidden_TD is None or not len(rows_R):
            return None
        return self._model.logits(hidden_TD[self._to_device(rows_R)], plan.num_candidates, plan.phase)

    def _run_layers(self, plan: StepPlan, chosen_R: Tensor | None) -> Tensor | None:
        """Return (T, D) after the last layer; None if the plan has no tokens."""
        if not plan.token_ids:
            if self.lockstep:
                self._fetch_every_layer()
            return None
        arrays = self.cache.begin(StepArrays.from_plan(plan, self.cache.block_size))
        num_chosen = num_deferred(arrays.token_ids_T)
        chosen_R = self._model.last_chosen(chosen_R, num_chosen, plan.phase) if num_chosen else None
        if self._graphs is not None and self._graphs.fits(arrays):
            return self._graphs.run(arrays, plan.policy, chosen_R)
        parts = [self._batch(part, plan.policy, chosen_R) for part in self._parts(arrays)]
        return self._model.forward(*parts, lane=self._lane if len(parts) > 1 else None)

    def _fetch_every_layer(self) -> None:
        """Fetch and release every layer without computing."""
        for span in self.weights.spans:
            for index in span:
                self.weights.layer(index)
            for index in span:
                self.weights.release(index)

    def _parts(self, arrays: StepArrays) -> Sequence[StepArrays]:
        """Return the step, or its parts: of at most ``most_rows`` rows, or two halves for the lane."""
        num_rows, num_decode_rows = len(arrays.token_ids_T), arrays.num_decode_rows
        if self._most_rows is not None and num_rows > max(self._most_rows, num_decode_rows):
            return cut_up(arrays, self._most_rows)
        if self._lane is not None and (row := cut_row(num_rows, num_decode_rows)):
            return cut(arrays, row)
        return [arrays]

    def _batch(self, arrays: StepArrays, policy: int, chosen_R: Tensor | None) -> Batch:
        tensors = {
            name: self._to_device(array)
            for name in arrays.__slots__
            if isinstance(array := getattr(arrays, name), np.ndarray)
        }
        if chosen_R is not None:
            tensors["token_ids_T"] = resolve_deferred(tensors["token_ids_T"], chosen_R)
        return Batch(**tensors, num_decode_rows=arrays.num_decode_rows, policy=policy)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return upload(array, torch.int32, self._device)
