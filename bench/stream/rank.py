"""Runs steps on one rank of ``bench stream`` without an engine, all ranks in step."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tightwire.bench.stream.options import StreamOptions
from tightwire.comm.group.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import one_for_all
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.open import Checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.sampling.rows import greedy_rows
from tightwire.model.step import StepPlan, make_plan
from tightwire.model.weights import WeightPlan
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import WeightSizes

_BLOCK_SIZE = 16
_LEAST_LEN = 512  # room for greedy texts


class Rank:
    """Builds runners for all arms on this rank, and times their passes."""

    def __init__(self, group: Group, options: StreamOptions, checkpoint: Checkpoint) -> None:
        self.group, self.options = group, options
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._formats = choose_formats(checkpoint.reader(), self._config, options.quantization)
        self._layout = split_model(self._config, self._formats, group.world_size)
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._routes = None
        if group.world_size > 1:
            policy = one_for_all(options.allreduce)
            self._routes = Routes([(options.allreduce, policy)], make_candidates([policy], group))

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    @property
    def num_streamed(self) -> int:
        return self.options.stream_layers or self.num_layers

    def build(self, plan: WeightPlan, prepared: Prepared | None = None) -> ModelRunner:
        longest = max(self.options.context, _LEAST_LEN)
        each = -(-self.options.context // _BLOCK_SIZE)
        return build_runner(
            self._config,
            prepared or self._checkpoint.reader(),
            self._layout,
            RankGroups(self.group, routes=self._routes),
            RunnerOptions(
                dtype=self._dtype,
                max_model_len=longest,
                num_blocks=max(-(-longest // _BLOCK_SIZE), each * max(self.options.batches)),
                block_size=_BLOCK_SIZE,
                formats=self._formats,
                weight_plan=plan,
                fetch_timeout_s=self.options.timeout_s,
            ),
        )

    def step_bytes(self, plan: WeightPlan) -> int:
        shard = self._layout.shards[self.group.rank]
        return WeightSizes(self._config, shard, self._formats, self._dtype, plan.codec).per_pass(plan)

    def step(self, batch: int) -> StepPlan:
        """A decode step with random tokens: the last of each of ``batch`` sequences."""
        token_ids = np.random.default_rng(self.options.seed).integers(0, self._config.vocab_size, batch)
        return make_step(token_ids, [1] * batch, [self.options.context] * batch, is_decode=True)

    def passes(self, run: Callable[[], object], count: int, prepare: Callable[[], None] | None = None) -> list[float]:
        """Seconds of ``count`` passes after an untimed one; each follows ``prepare`` and a barrier of all ranks."""
        seconds = []
        for number in range(1 + count):
            if prepare is not None:
                prepare()
            self.group.transport.barrier()
            self._synchronize()
            begin = time.perf_counter()
            run()
            self._synchronize()
            if number:
                seconds.append(time.perf_counter() - begin)
        return seconds

    def _synchronize(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)


def greedy_tokens(runner: ModelRunner, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation of ``prompt``, the same on every rank."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        new = tokens[-1:] if len(tokens) > len(prompt) else tokens
        tokens.append(int(run_step(runner, make_step(new, [len(new)], [len(tokens)], is_decode=len(new) == 1))[-1]))
    return tokens[len(prompt) :]


def run_step(runner: ModelRunner, step: StepPlan) -> Tensor:
    """The greedy tokens of a step, on every rank."""
    chosen = runner.choose(step, runner.execute(step))
    assert isinstance(chosen, Tensor), "every step of this bench has logits"
    return chosen


def make_step(
    token_ids: Sequence[int] | np.ndarray, query_lens: Sequence[int], context_lens: Sequence[int], *, is_decode: bool
) -> StepPlan:
    widest = -(-max(context_lens) // _BLOCK_SIZE)
    return make_plan(
        token_ids=token_ids,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=np.arange(len(context_lens) * widest),
        num_decode_rows=len(token_ids) if is_decode else 0,
        logit_rows=np.cumsum(query_lens) - 1,
        sampling=greedy_rows(len(query_lens)),
    )
