"""Trains one model on many ranks: shards parameters and gradients, and communicates in threads of its own (lanes).

    engine = Engine(model, plan, groups, options)
    engine.load_full(read_tensor)
    optimizer = torch.optim.AdamW(engine.param_groups(), lr=3e-4)
    for batches in data:
        for i, batch in enumerate(batches):
            with engine.micro_batch(last=i == len(batches) - 1):
                (model(**batch).loss / len(batches)).backward()
        engine.finish_gradients()
        norm = engine.clip_gradients(1.0)
        optimizer.step()
        engine.weights_changed()

All ranks make the same calls in the same order. A failure on a lane is raised in the thread that waits for the lane.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tightwire.comm.codec.codec import prepare_codecs
from tightwire.comm.collectives.all_gather import all_gather
from tightwire.comm.group.nodes import run_leg
from tightwire.training.engine.flat_parameters import NORMS, BucketPlan, FlatParameter, copy_into_shard, cut_shard
from tightwire.training.engine.gathered_weights import Trace, Weights
from tightwire.training.engine.gradients import GradientCompressor, Gradients, num_reduce_lanes
from tightwire.training.engine.hooks import Hooks, MicroBatch
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import FrozenShard, group_of, make_shards
from tightwire.training.ranks.groups import TrainGroups, shard_group

ReadTensor = Callable[[str], Tensor]


class Engine:
    """Takes the parameters out of ``model``; its modules have them only during their forward.

    Cost: the memory of ``training.engine.costs``, allocated at construction.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: BucketPlan,
        groups: TrainGroups,
        options: EngineOptions,
        compressor: GradientCompressor | None = None,
        trace: Trace = lambda *_: None,
    ) -> None:
        """
        Args:
            model: only names and shapes of its parameters are read; ``load_full`` sets the values, which are zeros until then.
            plan: made from this model for ``options.sharding.shard_ranks``.
            compressor: sums over the ranks that hold the same shard; required if there are several.
            trace: called when work on a buffer begins and ends.
        Raises:
            ValueError: plan or options do not match the groups.
        """
        sharding = options.sharding
        ranks = sharding.shard_group(groups.num_nodes, groups.world_size // groups.num_nodes)
        wanted = ranks.world_size
        if plan.shard_ranks != wanted:
            raise ValueError(
                f"the plan is for {plan.shard_ranks} shards; sharding {sharding.name} of {groups.world_size} ranks on "
                f"{groups.num_nodes} nodes needs {wanted}"
            )
        if compressor is None and wanted < groups.world_size:
            raise ValueError(
                f"sharding {sharding.name} of {groups.world_size} ranks has several ranks with the same shard; pass a "
                "compressor that sums over them"
            )
        prepare_codecs(groups.device, *options.codecs)
        self.plan, self.options, self.groups = plan, options, groups
        self._group = shard_group(groups.main, sharding)
        self._shards = make_shards(plan, options, ranks, groups.device)
        self.frozen_shards: Mapping[str, FrozenShard] = self._shards.frozen  # of this rank, by flat parameter; to read
        self._hooks = Hooks(model, plan)
        self._weights = Weights(plan, self._shards, options, groups.gather, trace)
        # Nothing else uses the main group while gradients are summed.
        lanes = groups.reduce, *([groups.main] if num_reduce_lanes(options, groups.num_nodes) > 1 else [])
        self._gradients = Gradients(plan, options, lanes, trace, compressor)
        self._anchor = torch.zeros((), device=groups.device, requires_grad=True)
        self._is_broken = self._is_closed = False

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent to others since the start."""
        return sum(group.bytes_sent for group in (self.groups.gather, self.groups.reduce, self.groups.main))

    @property
    def waited_s(self) -> float:
        """Seconds that the computing thread has waited for the lanes: communication that was not overlapped."""
        return self._weights.waited_s + self._gradients.waited_s

    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: ``matrices``, and ``norms`` (norms and biases), which should not decay."""
        chosen = {
            "matrices": [main for flat_param, main in self.named_flat_params() if flat_param.name != NORMS],
            "norms": [main for flat_param, main in self.named_flat_params() if flat_param.name == NORMS],
        }
        return [{"params": params, "name": name} for name, params in chosen.items() if params]

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """One forward and backward. ``last``: it is the last micro-batch before the optimizer steps."""
        with self._running(last=last):
            yield
        if last:
            self._gradients.end_step()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards without backward, between two steps; all ranks make the same number."""
        with torch.no_grad(), self._running(last=True):
            yield

    def finish_gradients(self) -> None:
        """Wait until the gradients are summed over all ranks; set ``grad`` of each shard to their mean."""
        self._gradients.finish()
        grads = self._gradients.grads()
        for flat_param, main in self.named_flat_params():
            main.grad = grads[flat_param.name]

    def gradient_norm(self) -> float:
        """The global norm of the gradients, summed in float64; the same bits on every rank."""
        own = [torch.linalg.vector_norm(main.grad, dtype=torch.float64) ** 2 for _, main in self.named_flat_params()]
        own_sum = torch.stack(own).sum().view(1)
        sums = run_leg(self.groups.main, self._group, all_gather, self._group, own_sum)
        return math.sqrt(sum(float(total) for total in sums))

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most ``max_norm``; returns the norm before scaling."""
        norm = self.gradient_norm()
        scale = max_norm / (norm + 1e-6)
        if scale < 1:
            for _, main in self.named_flat_params():
                assert main.grad is not None
                main.grad.mul_(scale)
        return norm

    def weights_changed(self) -> None:
        """Call after writing to main shards, such as an optimizer step: invalidates gathered trainable weights."""
        self._check_idle()
        for shard in self._shards.main.values():
            shard.version += 1
        self._weights.changed()

    def named_flat_params(self) -> Iterator[tuple[FlatParameter, nn.Parameter]]:
        """Every trainable flat parameter with this rank's main shard."""
        return ((shard.flat_param, shard.main) for shard in self._shards.main.values())

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard of each trainable flat parameter, below ``plan.shard_ranks``."""
        return self._group.rank

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter with its name in the model, in float32. Collective: gathers one flat parameter at a time.

        Do not write to a tensor or keep it: it may be memory that the optimizer uses.
        """
        for flat_param, main in self.named_flat_params():
            full_N = torch.cat(run_leg(self.groups.main, self._group, all_gather, self._group, main.data))
            for param in flat_param.params:
                yield param.name, param.of(full_N)

    def load_full(self, tensor_of: ReadTensor, blocks_of: ReadTensor | None = None) -> None:
        """Set every parameter to ``tensor_of(name)``. Not collective. Raises ValueError: a tensor has another shape.

        ``blocks_of``: the bytes of a parameter that is kept in blocks, (rows, bytes of a row).
        """
        for flat_param, main in self.named_flat_params():
            copy_into_shard(tensor_of, cut_shard(flat_param, self.shard_rank, self.plan.shard_ranks), main.data)
        self.load_frozen(tensor_of, blocks_of)
        self.weights_changed()

    def load_frozen(self, tensor_of: ReadTensor, blocks_of: ReadTensor | None = None) -> None:
        """The same for frozen parameters only. Cost: memory of one float32 shard at a time."""
        self._check_idle()
        for shard in self._shards.frozen.values():
            group = group_of(shard.form, self._group)
            numbers_S = torch.zeros(shard.flat_param.num_elems // group.world_size, device=self.groups.device)
            copy_into_shard(tensor_of, cut_shard(shard.flat_param, group.rank, group.world_size), numbers_S)
            blocks_S = None
            if (blocks := shard.flat_param.blocks) is not None and blocks_of is not None:
                blocks_S = torch.empty_like(shard.encoded)
                copy_into_shard(blocks_of, cut_shard(blocks, group.rank, group.world_size), blocks_S)
            shard.load(numbers_S, blocks_S)
        self._weights.changed()

    def frozen_sums(self) -> dict[tuple[str, int], int]:
        """``FrozenShard.sum`` of this rank's shards, by flat parameter and index of the shard."""
        return {(name, group_of(own.form, self._group).rank): own.sum for name, own in self.frozen_shards.items()}

    def close(self) -> None:
        """End the lanes and close the connections. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.groups.close()
        reason = RuntimeError("the engine was closed")
        self._weights.close(reason)
        self._gradients.close(reason)
        self._hooks.close()

    @contextmanager
    def _running(self, *, last: bool) -> Iterator[None]:
        self._check_idle()
        self._hooks.micro_batch = run = MicroBatch(
            self.plan, self.options, self._weights, self._gradients, self._anchor, last=last
        )
        try:
            yield
        except BaseException:
            self._is_broken = True  # lanes may wait for ranks that never join
            raise
        run.release_weights()
        self._hooks.micro_batch = None

    def _check_idle(self) -> None:
        if self._is_broken:
            raise RuntimeError("an earlier micro-batch or evaluation failed; close the engine")
        if self._hooks.micro_batch is not None:
            raise RuntimeError("a micro-batch or evaluation is running; end it first")
