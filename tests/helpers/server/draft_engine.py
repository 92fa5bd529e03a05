"""A whole engine in this process with a model that drafts, for which steps and drafted tokens take fixed times."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers.server.local_engine import LocalEngine, local_engine

from tightwire.comm.group.group import in_process_groups
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.open import Checkpoint, formats_of
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.formats import split_model
from tightwire.server.config.limits import Limits
from tightwire.server.engine.draft_runner import DraftRunner
from tightwire.server.engine.drafts import RowTimes
from tightwire.server.engine.model_drafts import ModelDrafter
from tightwire.server.plan.setting import choose_activations

SIZES: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48, "num_blocks": 64}


class Constant(RowTimes):
    """Every step takes as long, whatever is measured."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def learn(self, num_rows: int, seconds: float) -> None:
        assert seconds > 0

    def of(self, num_rows: Any) -> np.ndarray:
        return np.full(np.shape(num_rows), self._seconds)


class Counting:
    """A runner that keeps the rows of its steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.rows, self.sizes = DraftRunner(runner), list[int](), set[int]()
        self.num_ids = self._runner.num_ids

    def execute(self, plan: Any, num_ids: int) -> Any:
        self.rows.append(plan.num_rows)
        self.sizes.add(num_ids)
        return self._runner.execute(plan, num_ids)


@contextmanager
def drafting_engine(
    models: Mapping[str, Checkpoint],
    draft: str,
    dtype: torch.dtype = torch.float32,
    token_s: float = 0.0,
    text: bool = True,
    **options: Any,
) -> Iterator[tuple[LocalEngine, ModelDrafter, Counting]]:
    """The engine of the model ``itself``, in steps of 1 s. ``text``: what the text has follows the draft's tokens."""
    given: dict[str, Any] = SIZES | options
    dp = given.get("dp", 1)
    device = given.get("device", torch.device("cpu"))
    runner = _load_draft(models[draft], dtype, given["max_model_len"], given["num_blocks"] * dp, device)
    limits = {name: given[name] for name in SIZES} | {"prefix_cache": given.get("prefix_cache", "prompts")}
    counting = Counting(runner)
    drafter = ModelDrafter(counting, Limits(**limits, block_size=16), models["itself"].config.vocab_size, dp)  # pyright: ignore[reportArgumentType]
    drafter.max_tokens *= text
    drafter.times, drafter._token_times = Constant(1.0), Constant(token_s)
    with local_engine(models["itself"], dtype=dtype, drafter=drafter, **given) as local:
        yield local, drafter, counting
    runner.close()


def _load_draft(
    checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, num_blocks: int, device: torch.device
) -> ModelRunner:
    """The whole model as a server's rank 0 loads it: packed matrices are for activations in 8 bits, if there are kernels."""
    config, formats, prepared = checkpoint.config, formats_of(checkpoint, "auto"), checkpoint.prepared
    is_int8 = choose_activations("fastest", device.type, formats.packed) == "int8"
    formats = formats.with_int8_activations() if is_int8 else formats
    source = replace(prepared, int8_activations=is_int8) if prepared else checkpoint.reader()
    options = RunnerOptions(
        dtype=dtype, max_model_len=max_model_len, num_blocks=num_blocks, block_size=16, formats=formats
    )
    groups = RankGroups(replace(in_process_groups(1)[0], device=device))
    return build_runner(config, source, split_model(config, formats, 1), groups, options)
