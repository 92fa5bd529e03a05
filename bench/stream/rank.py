"""A rank of ``bench stream``: its part of the model under any plan, and passes that all ranks begin together."""

import time
from collections.abc import Callable

import torch

from tightwire.bench.stream.cells import Load
from tightwire.bench.stream.events import PROBE
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.bench.stream.steps import BLOCK_SIZE, make_step
from tightwire.comm.group.group import Group
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import one_for_all
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import WeightPlan, WeightSizes


class Rank:
    """What all arms have in common on this rank."""

    def __init__(
        self, group: Group, options: StreamBenchOptions, checkpoint: Checkpoint, world: Group | None = None
    ) -> None:
        """``group``: the ranks that this one sums with; ``world``: all whose passes begin together (None: no others)."""
        self.group, self.options, self._world = group, options, world or group
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._layout = make_layout(self._config, group.world_size)
        self._formats = choose_formats(checkpoint.reader(), self._config, options.quantization)
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._routes = _routes(options.all_reduce, group) if group.world_size > 1 else None

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def num_streamed(self) -> int:
        return self.options.stream_layers or self.num_layers

    def build(
        self, plan: WeightPlan, prepared: Prepared | None = None, peers: PartitionPeers | None = None
    ) -> ModelRunner:
        longest = max(self.options.context, self.options.prompt_rows or 0, PROBE.rows)
        each = -(-self.options.context // BLOCK_SIZE)
        return build_runner(
            self._config,
            prepared or self._checkpoint.reader(),
            self._layout,
            RankGroups(self.group, routes=self._routes, peers=peers),
            RunnerOptions(
                dtype=self._dtype,
                max_model_len=longest,
                num_blocks=max(-(-longest // BLOCK_SIZE), each * max(self.options.batches)),
                block_size=BLOCK_SIZE,
                formats=self._formats,
                weight_plan=plan,
                fetch_timeout_s=self.options.timeout_s,
            ),
        )

    def step_bytes(self, plan: WeightPlan) -> int:
        shard = self._layout.shards[self.group.rank]
        return WeightSizes(self._config, shard, self._formats, self._dtype, plan.codec).per_pass(plan)

    def step(self, load: Load) -> StepPlan:
        return make_step(load, self.options.context, self._config.vocab_size, self.options.seed)

    def passes(
        self, run: Callable[[], object], count: int, prepare: Callable[[], None] | None = None
    ) -> tuple[list[float], list[float], list[float]]:
        """One pass that is not timed, then ``count``: their seconds, core seconds, and beginnings. All ranks begin together,
        each with ``prepare`` behind it."""
        seconds, core_s, begins = [], [], []
        for number in range(1 + count):
            if prepare is not None:
                prepare()
            self._world.transport.barrier()
            self._synchronize()
            begin, core = time.perf_counter(), time.process_time()
            run()
            self._synchronize()
            if number:
                seconds.append(time.perf_counter() - begin)
                core_s.append(time.process_time() - core)
                begins.append(begin)
        return seconds, core_s, begins

    def _synchronize(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)


def _routes(name: str, group: Group) -> Routes:
    """One AllReduce for every message."""
    policy = one_for_all(name)
    return Routes([(name, policy)], make_candidates([policy], group))
