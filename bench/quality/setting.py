"""Makes the setting of a run before weights are read: the model, the arms, and windows of the text.

An arm is one AllReduce policy and weight codec for all layers. Windows have equal length, are spread evenly over the text
and do not overlap.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightwire.bench.quality.compared import compared
from tightwire.bench.quality.items import ROW_TOKENS, TaskItem, digest, make_items
from tightwire.bench.quality.options import (
    INT8_ACTIVATIONS,
    KV_CACHES,
    LOSSY_SITES,
    POLICY,
    WEIGHTS,
    QualityOptions,
    check_name,
    is_compared,
)
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.policy.rules import (
    DROP,
    Choice,
    Policy,
    PolicyFile,
    Rule,
    apply,
    check_shape,
    guarded,
    one_for_all,
    read_policy_file,
)
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.model.weights.formats import WeightFormats, choose_formats, split_model
from tightwire.training.data.documents import ENGLISH_NAME, english_text

LOSSLESS = "two-shot"  # adds in float32 in rank order and rounds once, as `auto` does on CPUs
EXACT = "exact"
MIX = "mix"  # the mix that ``--search`` finds

PLAIN_WEIGHTS = ("none", False)  # ``Arm.weights`` of the exact model

Place = tuple[str, int]  # site and layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    name: str
    policy: Policy
    phase: str = "prefill"  # of the rows that are measured
    weight_codec: str = "none"  # as ``serve --weight-codec`` sets it for the layers' matrices
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: --dtype
    int8_activations: bool = False  # in products with the layers' packed matrices
    # Messages are float32, as ``serve`` sends them through memory; else in --dtype, as it sends them over a wire.
    float32_sums: bool = False

    @property
    def weights(self) -> tuple[str, bool]:
        """Arms that are equal in this share their weights."""
        return self.weight_codec, self.int8_activations

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of messages, for activations in ``dtype``."""
        return torch.float32 if self.float32_sums else dtype

    def algorithm(self, site: str, layer: int) -> str:
        """The AllReduce of the measured rows at this site and layer."""
        return self.policy.choices(site, layer, self.phase)[0].algorithms[0]


def places(config: LlamaConfig) -> list[Place]:
    return [(site, layer) for site in LOSSY_SITES for layer in range(config.num_layers)]


def exact_arm() -> Arm:
    return Arm(name=EXACT, policy=one_for_all(LOSSLESS), float32_sums=True)


def make_arm(name: str, config: LlamaConfig, phase: str = "prefill") -> Arm:
    """Make an arm that sums the rows of ``phase`` as ``serve --allreduce NAME`` or ``--allreduce-decode NAME`` does.

    Other rows and embeddings are exact unless a policy file says otherwise; all sums are, in arms of weights, activations and
    caches. Raises ValueError if the AllReduce is unknown or needs several nodes, or a file is for another model.
    """
    check_name(name)
    if name.startswith(WEIGHTS):
        return replace(exact_arm(), name=name, weight_codec=name.removeprefix(WEIGHTS))
    if name in KV_CACHES:
        return replace(exact_arm(), name=name, kv_dtype=getattr(torch, name.partition(":")[2]))
    if name == INT8_ACTIVATIONS:
        return replace(exact_arm(), name=name, int8_activations=True)
    if name.startswith(POLICY):
        return file_arm(name, read_policy_file(Path(name.removeprefix(POLICY))), config, phase)
    algorithm, _, site = name.partition("@")
    arm = one_algorithm_arm(name, algorithm, site=site or None, phase=phase)
    rules = (part for rule in arm.policy.rules for part in guarded(rule, config.num_layers))
    return replace(arm, policy=Policy(tuple(rules)))


def one_algorithm_arm(
    name: str, algorithm: str, layers: tuple[int, ...] | None = None, site: str | None = None, phase: str = "prefill"
) -> Arm:
    """Make an arm that uses ``algorithm`` for rows of ``phase``, in some ``layers`` or at one ``site`` only if they are given."""
    choices = (Choice(up_to_bytes=None, algorithms=(algorithm,), reason="requested"),)
    lossy = (Rule(each, phase, choices, layers) for each in LOSSY_SITES if site in (None, each))
    return Arm(name=name, policy=Policy((*lossy, *one_for_all(LOSSLESS).rules)), phase=phase)


def file_arm(name: str, file: PolicyFile, config: LlamaConfig, phase: str = "prefill") -> Arm:
    """Make the arm of a policy file. Raises ValueError: the file is for another model."""
    check_shape(file, name, {"num_layers": config.num_layers, "hidden_size": config.hidden_size})
    return Arm(name=name, policy=apply(one_for_all(LOSSLESS), file), phase=phase)


def bytes_per_token(arm: Arm, config: LlamaConfig, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per token of a step of ``rows`` tokens in all layers' AllReduces, averaged over ranks."""
    names = Counter(arm.algorithm(*place) for place in places(config))
    return sum(num * bytes_at(name, config.hidden_size, world_size, rows, elem_bytes) for name, num in names.items())


@cache
def bytes_at(name: str, row_elems: int, world_size: int, rows: int, elem_bytes: int) -> float:
    """Bytes a rank sends per row in one AllReduce of ``rows`` rows, averaged over ranks."""
    if name == DROP:
        return 0.0
    if is_compared(name):
        return compared(name).row_bytes(row_elems, world_size)
    groups = in_process_groups(world_size)
    sent = [make_all_reduce(name, group).wire_bytes(rows * row_elems, elem_bytes) for group in groups]
    return sum(sent) / world_size / rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """N windows, each after ``num_first`` special tokens. ``calibration`` and ``measured`` are disjoint indices.

    ``num_decode``: only the rows of so many last tokens are scored, but for the very last, which nothing follows.
    """

    token_ids_NL: Tensor
    num_first: int
    text_tokens: int  # tokens of the whole text
    calibration: tuple[int, ...]
    measured: tuple[int, ...]
    num_decode: int = 0

    @property
    def num_scored(self) -> int:
        """The number of a window's rows whose next token is text, or of the generated ones among them."""
        return self.num_decode - 1 if self.num_decode else self.token_ids_NL.shape[1] - max(1, self.num_first)

    def scored(self, hidden_BLD: Tensor) -> Tensor:
        """Select the scored rows: (T, D)."""
        return hidden_BLD[:, -1 - self.num_scored : -1].flatten(0, 1)

    def next_ids(self, numbers: Sequence[int]) -> Tensor:
        """The next tokens of the rows of ``scored``: (T,)."""
        return self.token_ids_NL[list(numbers), -self.num_scored :].flatten()


def make_windows(tokenizer: Tokenizer, text: str, *, num_tokens: int, window: int, num_calibration: int = 0) -> Windows:
    """Cut windows for ``num_tokens`` (rounded up) and for calibration; raises ValueError if the text is too short."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = tokenizer.encode("")
    length = window - len(first)
    num_windows = -(-num_tokens // window) + num_calibration
    if length < 2 or num_windows * length > len(ids):
        most = max(0, len(ids) // max(1, length) - num_calibration) * window
        ask = f"or at most --tokens {most}" if most else "or a smaller --window and --tokens"
        raise ValueError(
            f"the text has {len(ids)} tokens, but {num_windows} windows of {window} need {num_windows * length}; "
            f"give a longer --text, {ask}"
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
        measured=tuple(number for number in range(num_windows) if number not in calibration),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    options: QualityOptions
    checkpoint: Checkpoint
    dtype: torch.dtype
    formats: WeightFormats
    windows: Windows
    arms: tuple[Arm, ...]
    items: tuple[TaskItem, ...] = ()

    @property
    def config(self) -> LlamaConfig:
        return self.checkpoint.config

    def batches(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(numbers), self.options.batch):
            yield numbers[start : start + self.options.batch]

    def facts(self) -> dict[str, Any]:
        options, dtype = self.options, str(self.dtype).removeprefix("torch.")
        return {
            "model": self.checkpoint.name,
            "num_layers": self.config.num_layers,
            "hidden_size": self.config.hidden_size,
            "dtype": dtype,
            "weights": self.formats.describe(dtype),
            "text": ENGLISH_NAME if options.text is None else str(options.text),
            "text_tokens": self.windows.text_tokens,
            "tokens": len(self.windows.next_ids(self.windows.measured)),
            "window": options.window,
            "decode": options.decode,
            "batch": options.batch,
            "world_sizes": list(options.world_sizes),
            "seed": options.seed,
            "items": len(self.items),
            "items_digest": digest(self.items) if self.items else None,
        }


def read_text(path: Path) -> str:
    """The text of a file; raises ValueError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path} cannot be read as UTF-8 text: {error}") from None


def make_setting(options: QualityOptions) -> Setting:
    """Open the model and cut the text; ValueError if the text, the model, its split or a policy file is unfit."""
    text = english_text() if options.text is None else read_text(options.text)
    checkpoint = open_checkpoint(options.model, options.seed)
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, options.quantization)
    if max(options.world_sizes) > config.num_heads:
        raise ValueError(f"--world-sizes must be at most {config.num_heads}, the number of the model's query heads")
    for world_size in options.world_sizes:
        split_model(config, formats, world_size)
    if options.window > config.max_positions:
        raise ValueError(f"--window {options.window} exceeds the model's {config.max_positions} positions")
    phase = "decode" if options.decode else "prefill"
    arms = tuple(make_arm(name, config, phase) for name in options.algorithms)
    if formats.packed and (coded := [arm.name for arm in arms if arm.weight_codec != "none"]):
        raise ValueError(
            f"{', '.join(coded)}: a weight codec encodes plain matrices only, but these are packed ({formats.name}); use "
            "--quantization none"
        )
    if not formats.packed and any(arm.int8_activations for arm in arms):
        raise ValueError(f"{INT8_ACTIVATIONS} is for packed weights, these are plain; add --quantization int8 or int4")
    tokenizer = checkpoint.tokenizer()
    if options.items and options.window < ROW_TOKENS:
        raise ValueError(f"--items needs --window {ROW_TOKENS} or more, got {options.window}")
    windows = make_windows(
        tokenizer,
        text,
        num_tokens=options.tokens,
        window=options.window,
        num_calibration=0 if options.search is None else -(-options.search_tokens // options.window),
    )
    windows = replace(windows, num_decode=options.decode)
    name = config.dtype if options.dtype == "auto" else options.dtype
    dtype = torch.float32 if name == "float64" else getattr(torch, name)
    return Setting(
        options=options,
        checkpoint=checkpoint,
        dtype=dtype,
        formats=formats,
        windows=windows,
        arms=arms,
        items=tuple(make_items(tokenizer, options.items)),
    )
