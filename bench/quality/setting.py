"""Opens the model, cuts the text into windows and checks the options, all before reading weights.

Windows have equal length, are spread evenly over the text and do not overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightwire.bench.quality.arms import Arm, make_arm
from tightwire.bench.quality.options import QualityOptions
from tightwire.bench.quality.ranks import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS
from tightwire.bench.report.environment import describe_environment
from tightwire.bench.text import ENGLISH_NAME, english_text, read_text
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.model.weights.formats import WeightFormats, check_split, choose_formats


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """N windows as ``token_ids_NL``; each begins with the ``num_first`` tokens the tokenizer puts before a text.

    ``calibration`` and ``judged`` are disjoint indices: windows for the search, and windows for the reported figures.
    """

    token_ids_NL: Tensor
    num_first: int
    text_tokens: int  # tokens of the whole text
    calibration: tuple[int, ...]
    judged: tuple[int, ...]

    @property
    def num_scored(self) -> int:
        """The number of a window's rows whose next token is text."""
        return self.token_ids_NL.shape[1] - max(1, self.num_first)

    def scored(self, hidden_BLD: Tensor) -> Tensor:
        """Select the rows whose next token is text: (T, D)."""
        return hidden_BLD[:, max(0, self.num_first - 1) : -1].flatten(0, 1)

    def next_ids(self, numbers: Sequence[int]) -> Tensor:
        """The next tokens of the rows of ``scored``: (T,)."""
        return self.token_ids_NL[list(numbers), max(1, self.num_first) :].flatten()


def make_windows(tokenizer: Tokenizer, text: str, *, num_tokens: int, window: int, num_calibration: int = 0) -> Windows:
    """Cut windows of ``window`` tokens: ``num_tokens`` (rounded up) to judge, and ``num_calibration`` windows.

    Raises:
        ValueError: the text is too short; the message has its length.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = tokenizer.encode("")
    length = window - len(first)
    num_judged = -(-num_tokens // window)
    num_windows = num_judged + num_calibration
    if length < 2 or num_windows * length > len(ids):
        most = max(0, len(ids) // max(1, length) - num_calibration) * window
        ask = f"or ask for at most --tokens {most}" if most else "or ask for smaller --window and --tokens"
        found_with = f" ({num_calibration} of them for the search)" if num_calibration else ""
        raise ValueError(
            f"the text has {len(ids)} tokens, and {num_windows} windows of {window}{found_with} need "
            f"{num_windows * length}; give a longer --text, {ask}"
        )
    # Start at multiples of the length, evenly spaced over the text.
    places = len(ids) // length
    starts = [number * places // num_windows * length for number in range(num_windows)]
    token_ids_NL = torch.tensor([[*first, *ids[start : start + length]] for start in starts])
    calibration = tuple((2 * number + 1) * num_windows // (2 * num_calibration) for number in range(num_calibration))
    return Windows(
        token_ids_NL=token_ids_NL,
        num_first=len(first),
        text_tokens=len(ids),
        calibration=calibration,
        judged=tuple(number for number in range(num_windows) if number not in calibration),
    )


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
        ValueError: the text is missing or too short, the model cannot be split, or a policy file is for another model.
        ModelError: the model does not exist.
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
    """Choose the dtype as ``serve --dtype`` does."""
    name = config.dtype if asked == "auto" else asked
    if name == "float16" and config.dtype == "bfloat16":
        raise ValueError(
            "--dtype float16: the checkpoint is in bfloat16, whose range float16 does not have; "
            "use --dtype bfloat16 or float32"
        )
    return torch.float32 if name == "float64" else getattr(torch, name)
