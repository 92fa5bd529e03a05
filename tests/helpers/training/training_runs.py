"""Runs of `tightwire train` on ranks that are threads, with a tiny model and a little text."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import run_threads
from helpers.training.thread_groups import in_process_train_groups
from tiny import VARIANTS, make_tiny

from tightwire.comm.group.group import in_process_groups
from tightwire.comm.group.topology import Topology
from tightwire.run_page import LOG, read_log
from tightwire.training.config.read import read_config
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import RunData
from tightwire.training.engine.options import engine_options
from tightwire.training.ranks.groups import Control
from tightwire.training.run.rollouts import Engines
from tightwire.training.run.run import Run
from tightwire.training.run.setup import Ranks

_YAML = """
run: {run}
device: cpu
model:
  shape: {{hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 48}}
data: {{files: ["{text}"], sequence_tokens: 16, held_out: 0.2, shuffle_documents: 8}}
batch: {{sequences: 8, micro_sequences: 2}}
optimizer: {{lr: 1e-2}}
schedule: {{steps: 6, warmup_steps: 2}}
evaluation: {{every: 0, sequences: 6, sample_tokens: 4}}
checkpoint: {{every: 0}}
log: {{tensorboard: false, peak_tflops: 1}}
"""


def write_config(folder: Path, run: str = "run") -> Path:
    """A small run over a text of its own; the file's path."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(
            "\n\n".join(f"document {i} says {'abcdefgh'[i % 8] * (i % 23 + 3)} and {i * i}" for i in range(80))
        )
    path = folder / f"{run}.yaml"
    path.write_text(_YAML.format(run=folder / run, text=text))
    return path


def make_config(folder: Path, *overrides: str, run: str = "run") -> TrainConfig:
    return read_config(write_config(folder, run), overrides)


def train(
    config: TrainConfig,
    world_size: int = 1,
    num_nodes: int = 1,
    stop_signal: Callable[[], int] = lambda: 0,
    others: Mapping[int, TrainConfig] | None = None,
    engines: Engines | None = None,
) -> list[int]:
    """Run it; what each rank's ended with. The first rank's error is raised. ``others``: ranks that are told otherwise."""
    torch.set_num_threads(1)
    options, from_launcher = engine_options(config), dict.fromkeys(range(world_size), config) | dict(others or {})
    config.check_ranks(Topology(0, world_size, num_nodes=num_nodes))
    groups = in_process_train_groups(world_size, num_nodes)
    controls = [Control(group) for group in in_process_groups(world_size)]

    def one(rank: int) -> int:
        with Ranks(groups=groups[rank], control=controls[rank]) as ranks:
            run = Run(from_launcher[rank], options, RunData.find(from_launcher[rank]), ranks, engines)
            try:
                return run.train(stop_signal)
            finally:
                run.trained.engine.close()

    return run_threads([partial(one, rank) for rank in range(world_size)])


def make_prompt_config(
    folder: Path, *overrides: str, shape: Mapping[str, Any] = VARIANTS["odd-heads"], run: str = "run"
) -> TrainConfig:
    """A run of GRPO or PPO on 40 prompts, with a tiny model of ``shape``."""
    base, path = folder / "model", folder / "prompts.jsonl"
    if not base.exists():
        make_tiny(base, **shape)
        lines = [{"prompt": [{"role": "user", "content": f"say {i}"}], "offset": i % 3} for i in range(40)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return make_config(
        folder,
        f"model={{start: {base}, lora: {{rank: 4}}}}",
        f"data={{files: [{path}], kind: prompts, sequence_tokens: 64, shuffle_documents: 8}}",
        *overrides,
        run=run,
    )


def losses(config: TrainConfig) -> list[float]:
    return [line["loss"] for line in log_lines(config) if "loss" in line]


def log_lines(config: TrainConfig) -> Sequence[dict[str, Any]]:
    return read_log(Path(config.run) / LOG)


class StopAfter:
    """Ctrl-C in a run's step after as many as its log has had lines of."""

    def __init__(self, config: TrainConfig, steps: int) -> None:
        self._config, self._steps = config, steps

    def __call__(self) -> int:
        is_there = (Path(self._config.run) / LOG).exists()
        return 2 if is_there and len(losses(self._config)) >= self._steps - 1 else 0
