"""What a run of ``bench quality`` works on. Everything that can be refused is refused here, before a weight is read."""

from dataclasses import dataclass
from typing import Any

import torch

from tightwire.bench.quality.arms import Arm, make_arm
from tightwire.bench.quality.greedy import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS
from tightwire.bench.quality.options import QualityOptions
from tightwire.bench.quality.windows import Windows, make_windows
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.text import ENGLISH_NAME, english_text, read_text
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights.formats import WeightFormats, check_split, choose_formats


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    options: QualityOptions
    checkpoint: Checkpoint
    dtype: torch.dtype
    formats: WeightFormats
    windows: Windows
    arms: tuple[Arm, ...]
    facts: dict[str, Any]

    @property
    def config(self) -> LlamaConfig:
        return self.checkpoint.config


def make_setting(options: QualityOptions) -> Setting:
    """Open the model and cut the text.

    Raises:
        ValueError: a text that is too short or no text, ranks that the model cannot be split to, a policy file of
            another model.
        ModelError: no such model.
    """
    text = english_text() if options.text is None else read_text(options.text)
    checkpoint = open_checkpoint(options.model, options.seed)
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, options.quantization)
    for world_size in options.world_sizes:
        _check_split(config, world_size, formats)
    if options.window > config.max_positions:
        raise ValueError(f"--window {options.window} is more than the {config.max_positions} positions of the model")
    arms = tuple(make_arm(name, config) for name in options.algorithms)
    if formats.packed and (coded := [arm.name for arm in arms if arm.weight_codec != "none"]):
        raise ValueError(
            f"{', '.join(coded)}: only plain matrices go through a codec, and these are packed ({formats.name}); give "
            "--quantization none"
        )
    windows = make_windows(
        checkpoint.tokenizer(),
        text,
        num_tokens=options.tokens,
        window=options.window,
        num_calibration=0 if options.search is None else -(-options.search_tokens // options.window),
    )
    dtype = _choose_dtype(options.dtype, config)
    return Setting(
        options=options,
        checkpoint=checkpoint,
        dtype=dtype,
        formats=formats,
        windows=windows,
        arms=arms,
        facts={
            "environment": describe_environment(),
            "model": checkpoint.name,
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "dtype": str(dtype).removeprefix("torch."),
            "weights": formats.name or str(dtype).removeprefix("torch."),
            "text": ENGLISH_NAME if options.text is None else str(options.text),
            "text_tokens": windows.text_tokens,
            "tokens": len(windows.next_ids(windows.judged)),
            "window": options.window,
            "batch": options.batch,
            "world_sizes": list(options.world_sizes),
            "greedy": {"prompts": NUM_PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS},
            "seed": options.seed,
        },
    )


def _check_split(config: LlamaConfig, world_size: int, formats: WeightFormats) -> None:
    if world_size > config.num_heads:
        raise ValueError(
            f"--world-sizes {world_size}: the model has {config.num_heads} query heads, and a rank needs at least one; "
            f"ask for at most {config.num_heads}"
        )
    check_split(make_layout(config, world_size), config, formats)


def _choose_dtype(asked: str, config: LlamaConfig) -> torch.dtype:
    """As ``serve --dtype`` does."""
    name = config.dtype if asked == "auto" else asked
    if name == "float16" and config.dtype == "bfloat16":
        raise ValueError(
            "--dtype float16: the checkpoint is in bfloat16, whose range float16 does not have; "
            "use --dtype bfloat16 or float32"
        )
    return torch.float32 if name == "float64" else getattr(torch, name)
