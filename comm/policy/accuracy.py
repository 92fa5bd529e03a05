"""The accuracy that quantized AllReduces cost a model, and the files with the figures of ``tightwire tune --quality``.

There is one file for each model, by its fingerprint, and number of ranks. The figures hold for prompt rows on any host,
because the ranks' arithmetic does not depend on the host. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from tightwire.whole_folder import write_atomic

SCHEMA = "tightwire.accuracy/1"


class Loss(msgspec.Struct, frozen=True):
    """The cost in accuracy of one AllReduce, compared with exact sums."""

    kl: float  # mean KL of next-token distributions, in nats
    perplexity: float  # relative rise

    def __str__(self) -> str:
        return f"KL {self.kl:.2g}, perplexity {100 * self.perplexity:+.2g} %"


# From docs/quantized-allreduce.md: the worst of 2, 4 and 8 ranks.
_REFERENCE = "SmolLM2-135M"
_REFERENCE_LOSSES = {
    "flash-int8": Loss(0.0006, 0.0004),
    "flash-int6": Loss(0.0014, 0.0013),
    "flash-int5": Loss(0.0040, 0.0047),
    "flash-int4": Loss(0.016, 0.016),
    "flash-int3": Loss(0.080, 0.082),
}


class AccuracyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one model with one number of ranks, by AllReduce."""

    model: str
    world_size: int
    dtype: str  # dtype of the activations
    tokens: int
    losses: dict[str, Loss]
    date: str  # ISO, UTC
    schema: Literal["tightwire.accuracy/1"] = SCHEMA


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """The known figures and the model they were measured on; ``command`` measures the model in use."""

    losses: Mapping[str, Loss] = field(default_factory=lambda: _REFERENCE_LOSSES)
    measured_on: str = f"on {_REFERENCE}, the worst of 2, 4 and 8 ranks"
    of_this_model: bool = False
    command: str = "tightwire tune --quality MODEL"

    def describe(self, name: str) -> str:
        """The figures of ``name`` with their source, or the command that measures them."""
        loss = self.losses.get(name)
        if loss is None and name.startswith("hierarchical:"):
            return "its cost in accuracy is not known, because `tightwire tune --quality` measures sums on one node"
        if loss is None:
            return f"its cost in accuracy is not known; `{self.command} --allreduce {name}` measures it"
        hint = "" if self.of_this_model else f"; `{self.command}` measures this model"
        return f"{loss} (measured {self.measured_on}{hint})"


def accuracy_path(cache: Path, fingerprint: str, world_size: int) -> Path:
    return cache / "tune" / f"accuracy-{fingerprint}-{world_size}.json"


def read_accuracy(cache: Path, fingerprint: str, world_size: int, default: Accuracy) -> tuple[Accuracy, str | None]:
    """The figures for a model and a number of ranks; ``default`` if there are none, with a warning if a file is damaged."""
    path = accuracy_path(cache, fingerprint, world_size)
    try:
        file = msgspec.json.decode(path.read_bytes(), type=AccuracyFile)
    except FileNotFoundError:
        return default, None
    except OSError as error:
        return default, f"{path} cannot be read ({error.strerror}); accuracy is that {default.measured_on}"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return default, f"{path} is damaged ({error}); `{default.command}` replaces it"
    measured_on = f"on this model with {file.world_size} ranks, {file.tokens:,} tokens, {file.date[:10]}"
    return replace(default, losses=file.losses, measured_on=measured_on, of_this_model=True), None


def write_accuracy(cache: Path, fingerprint: str, file: AccuracyFile) -> Path:
    """Write ``file`` atomically and return its path. Raises OSError if the folder cannot be written."""
    path = accuracy_path(cache, fingerprint, file.world_size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror}); measured accuracy is stored there: make it writable, or set "
            "XDG_CACHE_HOME to a folder that is"
        ) from None
    return path
