"""Turns a step plan into tensors, runs the model, and gives rank 0 its logits. One runner per rank."""

import numpy as np
import torch
from torch import Tensor

from tightwire.comm.lane import CommLane
from tightwire.comm.ledger.ledger import Ledger
from tightwire.model.cache.kv_cache import CacheSource
from tightwire.model.decode_graphs import DecodeGraphs
from tightwire.model.llama import Llama
from tightwire.model.logits_gather import LogitsMeeting
from tightwire.model.step import StepPlan, ints
from tightwire.model.step_arrays import Batch, StepArrays, cut, cut_row, cut_up, num_deferred, resolve_deferred
from tightwire.model.transfer import upload
from tightwire.model.weights.source import WeightSource


class ModelRunner:
    """Executes plans in order. All ranks of a group execute the same plans.

    Of several replicas each executes plans of its own, one in every step, which may be empty.
    """

    def __init__(
        self,
        model: Llama,
        cache: CacheSource,
        ledger: Ledger,
        weights: WeightSource,
        graphs: DecodeGraphs | None = None,
        lane: CommLane | None = None,
        most_rows: int | None = None,
        *,
        meeting: LogitsMeeting | None = None,
        lockstep: bool = False,
    ) -> None:
        """``graphs``: replayed for the steps that have one; None: every step is run kernel by kernel.

        ``most_rows``: longer steps with a prompt go through each layer in several parts; None: in one.
        ``meeting``: where the replicas' logits meet; None: there is one replica.
        ``lockstep``: weights come to all replicas together, and one with nothing to compute goes through the layers too.
        ``lane``: where one half of a step with a prompt is summed while the other is computed; None: nowhere.
        """
        self._model, self._graphs, self._lane = model, graphs, lane
        self._ledger, self._most_rows = ledger, most_rows
        self.weights, self.cache = weights, cache
        self.meeting, self.lockstep = meeting, lockstep
        self._block_size = cache.block_size
        self._device = cache.device

    def close(self) -> None:
        """End what fetches weights, keys and values. May be called twice."""
        self.weights.close()
        self.cache.close()

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor | None:
        """Run one forward pass; keys and values of the new tokens are in the cache afterwards.

        On CUDA the host only launches it, and waits for nothing.

        Args:
            chosen_R: on rank 0, the tokens (R,) int32 chosen after the last step, if the plan refers to any.
        Returns:
            Logits (R, V) float32 of ``plan.logit_rows`` on rank 0; None on other ranks, and when R is 0. With
            ``plan.num_candidates`` those beside the best may be minus infinity. With ``plan.meeting`` those of all replicas.
        """
        # A step with any prompt in it sends messages of a prompt's size: that is what the two phases tell apart.
        self._ledger.phase = "decode" if plan.is_decode else "prefill"
        hidden_TD = self._hidden(plan, chosen_R)
        rows_R = ints(plan.logit_rows)
        if plan.meeting:
            assert self.meeting is not None, "a plan of several replicas, and there is one"
            local_RV = None
            if hidden_TD is not None and len(rows_R):
                local_RV = self._model.local_logits(hidden_TD[self._to_device(rows_R)])
            return self.meeting.gather(plan.meeting, local_RV)
        if hidden_TD is None or not len(rows_R):
            return None
        return self._model.logits(hidden_TD[self._to_device(rows_R)], plan.num_candidates)

    def _hidden(self, plan: StepPlan, chosen_R: Tensor | None) -> Tensor | None:
        """(T, D) after the last layer; None where the plan has no tokens."""
        if not plan.token_ids:
            if self.lockstep:
                self._walk()
            return None
        arrays = self.cache.begin(self._arrays(plan))
        num_chosen = num_deferred(arrays.token_ids_T)
        chosen_R = self._model.last_chosen(chosen_R, num_chosen) if num_chosen else None
        if self._graphs is not None and self._graphs.fits(arrays):
            return self._graphs.run(arrays, plan.arm, chosen_R)
        parts = [self._batch(part, plan.arm, chosen_R) for part in self._parts(arrays)]
        return self._model.forward(*parts, lane=self._lane if len(parts) > 1 else None)

    def _walk(self) -> None:
        """One pass over the layers, as every step makes one, without computing."""
        for span in self.weights.spans:
            for index in span:
                self.weights.layer(index)
            for index in span:
                self.weights.release(index)

    def _parts(self, arrays: StepArrays) -> list[StepArrays]:
        """The step, or what it is cut into: to fit, or else to be summed one half beside the other."""
        num_rows, num_decode_rows = len(arrays.token_ids_T), arrays.num_decode_rows
        if self._most_rows is not None and num_rows > max(self._most_rows, num_decode_rows):
            return cut_up(arrays, self._most_rows)
        if self._lane is not None and (row := cut_row(num_rows, num_decode_rows)):
            return list(cut(arrays, row))
        return [arrays]

    def _arrays(self, plan: StepPlan) -> StepArrays:
        query_lens_B, context_lens_B = ints(plan.query_lens), ints(plan.context_lens)
        block_tables_BM = ints(plan.block_tables).reshape(len(query_lens_B), -1)
        query_start_B1 = np.zeros(len(query_lens_B) + 1, dtype=np.int32)
        np.cumsum(query_lens_B, out=query_start_B1[1:])
        sequence_T = np.repeat(np.arange(len(query_lens_B)), query_lens_B)
        first_position_B = context_lens_B - query_lens_B
        positions_T = (
            np.arange(query_start_B1[-1], dtype=np.int32) + (first_position_B - query_start_B1[:-1])[sequence_T]
        )
        block, offset = positions_T // self._block_size, positions_T % self._block_size
        slots_T = block_tables_BM[sequence_T, block] * self._block_size + offset
        return StepArrays(
            token_ids_T=ints(plan.token_ids),
            positions_T=positions_T,
            slots_T=slots_T,
            query_start_B1=query_start_B1,
            context_lens_B=context_lens_B,
            block_tables_BM=block_tables_BM,
            num_decode_rows=plan.num_decode_rows,
        )

    def _batch(self, arrays: StepArrays, arm: int, chosen_R: Tensor | None) -> Batch:
        token_ids_T = self._to_device(arrays.token_ids_T)
        return Batch(
            token_ids_T=token_ids_T if chosen_R is None else resolve_deferred(token_ids_T, chosen_R),
            positions_T=self._to_device(arrays.positions_T),
            slots_T=self._to_device(arrays.slots_T),
            query_start_B1=self._to_device(arrays.query_start_B1),
            context_lens_B=self._to_device(arrays.context_lens_B),
            block_tables_BM=self._to_device(arrays.block_tables_BM),
            num_decode_rows=arrays.num_decode_rows,
            arm=arm,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return upload(array, torch.int32, self._device)
