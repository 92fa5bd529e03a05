"""What a replayed decode step gives a GPU to do beside the replay: bytes copied to it, and torch's operations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.model.device_work import DeviceWork
from tiny import make_tiny
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.rows import SampleRows, sampled_row
from tightwire.model.step import deferred_token, make_plan

pytestmark = pytest.mark.gpu

_WIDTH = 2


def _steps(folder: Path, device: torch.device, num_rows: int, max_model_len: int) -> tuple[list[DeviceWork], list[int]]:
    """Three greedy steps of the same rows, each with the tokens of the one before; the work of each, and the last's tokens."""
    checkpoint = open_checkpoint(str(folder))
    blocks = np.arange(num_rows * _WIDTH).reshape(num_rows, _WIDTH)
    runner = build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, 1),
        RankGroups(open_process_group(Topology(0, 1), store=HashStore(), device=device)),
        RunnerOptions(
            dtype=torch.float32,
            max_model_len=max_model_len,
            num_blocks=blocks.size,
            block_size=16,
            graphs_up_to=4,
        ),
    )
    greedy = [sampled_row(SamplingParams(max_tokens=9, temperature=0.0), checkpoint.config.vocab_size)] * num_rows

    def step(tokens: Sequence[int], length: int, chosen_R: torch.Tensor | None) -> torch.Tensor:
        plan = make_plan(
            token_ids=tokens,
            query_lens=[1] * num_rows,
            context_lens=[length] * num_rows,
            block_tables=blocks,
            num_decode_rows=num_rows,
            logit_rows=range(num_rows),
            sampling=SampleRows(np.array(greedy, np.float64).tobytes()),
        )
        results = runner.choose(plan, runner.execute(plan, chosen_R))
        assert isinstance(results, torch.Tensor)
        return results.int()

    chosen_R, works = None, list[DeviceWork]()
    for length in range(1, 4):
        with DeviceWork(device) as work:
            tokens = range(num_rows) if chosen_R is None else [deferred_token(row) for row in range(num_rows)]
            chosen_R = step(tokens, length, chosen_R)
        works.append(work)
    runner.close()
    assert chosen_R is not None
    return works, chosen_R.tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
def test_bytes_copied_do_not_grow_with_the_longest_context(num_rows: int, device: torch.device, tmp_path: Path) -> None:
    """Tables are copied in the first step alone; the rest is a few numbers a row."""
    folder = make_tiny(tmp_path)
    short, long = (_steps(folder, device, num_rows, length) for length in (32, 4096))
    first, *later = [work.copied_bytes for work in long[0]]
    assert short[1] == long[1] and [first, *later] == [work.copied_bytes for work in short[0]]
    assert [first - each for each in later] == [4 * num_rows * _WIDTH] * 2
    assert max(later) <= 64 * 4
