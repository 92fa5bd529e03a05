"""Measures how fast this machine computes, with some layers of the model itself."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tightwire.comm.group.group import Group
from tightwire.comm.group.host import num_cores
from tightwire.comm.policy.schedule import FEW_ROWS, HostRates
from tightwire.comm.transport.in_process import InProcessTransport, ThreadExchange
from tightwire.kernels.spec.packed import Matrix
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.layout import make_layout
from tightwire.model.step import make_plan
from tightwire.server.config.limits import BLOCK_SIZE
from tightwire.server.plan.layout_times import RowWork
from tightwire.server.plan.rank_bytes import MemoryInputs

_LEAST_BYTES = 256 << 20  # of the layers, more than a cache holds
_ROWS, _FAR = 256, 2048  # of a step that products bound; tokens that the rows of another one attend to
_EACH_S = 0.4


class _ConstantReader(RandomReader):
    """Weights of one value, which are made fast. A product takes the same time with any numbers."""

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        if isinstance(out, torch.Tensor):
            out.fill_(0.02)
        else:
            out.blocks_OB.fill_(0x11)


def measure_rates(inputs: MemoryInputs, work: RowWork, num_ranks: int = 1) -> HostRates:
    """Measure what each of ``num_ranks`` has of the usable cores, or the first GPU, in some seconds."""
    torch.set_num_threads(max(1, num_cores() // num_ranks))
    config, device = inputs.model, torch.device(inputs.device)
    num_layers = min(config.num_layers, max(1, int(_LEAST_BYTES / work.layer_bytes)))
    small = replace(config, num_layers=num_layers, vocab_size=256, max_positions=max(config.max_positions, _FAR))
    transport = InProcessTransport(ThreadExchange(1), 0, timeout_s=60.0)
    group = Group(rank=0, world_size=1, device=device, timeout_s=60.0, transport=transport)
    sizes: dict[str, Any] = {"max_model_len": _FAR, "num_blocks": _FAR // BLOCK_SIZE, "block_size": BLOCK_SIZE}
    options = RunnerOptions(dtype=getattr(torch, inputs.dtype), formats=inputs.formats, **sizes)
    runner = build_runner(small, _ConstantReader(small, 0), make_layout(small, 1), RankGroups(group), options)

    def layer_s(sequences: int, rows: int, context: int) -> float:
        """The median of several passes, by layer."""
        blocks = context // BLOCK_SIZE
        plan = make_plan(
            token_ids=np.ones(sequences * rows),
            query_lens=[rows] * sequences,
            context_lens=[context] * sequences,
            block_tables=np.arange(sequences * blocks),
            num_decode_rows=sequences if rows == 1 else 0,
            logit_rows=[],
        )
        passes, end = list[float](), time.perf_counter() + _EACH_S
        while len(passes) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            runner.execute(plan)
            if device.type == "cuda":
                torch.cuda.synchronize()
            passes.append(time.perf_counter() - start)
        return float(np.median(passes[1:])) / num_layers

    try:
        one_s, few_s = (layer_s(rows, 1, _FAR // FEW_ROWS) for rows in (1, FEW_ROWS))
        near_s, far_s = (layer_s(1, _ROWS, context) for context in (_ROWS, _FAR))
    finally:
        runner.close()
    pair_s = max(far_s - near_s, 1e-9) / (_ROWS * (_FAR - _ROWS))
    many_s = near_s - few_s - pair_s * _ROWS * _ROWS / 2
    return HostRates(
        read=work.layer_bytes / one_s,
        few_flops=(FEW_ROWS - 1) * work.layer_flops / max(few_s - one_s, 1e-9),
        many_flops=(_ROWS - FEW_ROWS) * work.layer_flops / max(many_s, 1e-9),
        attention_flops=work.pair_flops / pair_s,
    )
