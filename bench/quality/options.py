"""The options of ``tightwire bench quality``."""

import argparse
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.options import OutputOptions
from tightwire.bench.quality.arms import WEIGHTS, check_name
from tightwire.bench.report.result_files import add_flags, check_label
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import describe_all_reduce_names
from tightwire.model.weights.formats import QUANTIZATIONS

_FORM = re.compile(r"(kl)=([0-9.eE+-]+)|(ppl)=([0-9.eE+-]+)%")


@dataclass(frozen=True, slots=True)
class Budget:
    """The allowed accuracy loss: ``kind`` is ``kl`` (mean nats) or ``ppl`` (relative increase)."""

    text: str
    kind: str
    limit: float

    def allows(self, row: Mapping[str, Any]) -> bool:
        """True if an arm's ``row`` at one world size is within the budget.

        Perplexity is noisy on few tokens, so the upper end of its interval counts.
        """
        if self.kind == "kl":
            return row["kl_mean"] <= self.limit
        high = row["perplexity_delta_high"]
        return (row["perplexity_delta"] if high is None else high) <= self.limit


def parse_budget(text: str) -> Budget:
    """Parse ``kl=0.01`` or ``ppl=0.1%``; raise ValueError for anything else."""
    match = _FORM.fullmatch(text.strip())
    number = (match[2] or match[4]) if match else ""
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if match is None or not 0 <= limit < math.inf:
        raise ValueError(
            f"--budget {text!r} is no budget; write kl=0.01 (mean KL in nats, at most) or ppl=0.1% (increase of perplexity)"
        )
    return Budget(text, "kl", limit) if match[1] else Budget(text, "ppl", limit / 100)


def cheapest_inside(rows: Sequence[Mapping[str, Any]], budget: Budget) -> str | None:
    """The arm that sends the fewest bytes among those within the budget at every world size, or None.

    Ties go to the smaller KL.
    """
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    inside = [name for name in names if all(budget.allows(row) for row in rows if row["algorithm"] == name)]

    def cost(name: str) -> tuple[float, float]:
        own = [row for row in rows if row["algorithm"] == name]
        return sum(row["bytes_per_token"] for row in own), sum(row["kl_mean"] for row in own)

    return min(inside, key=cost, default=None)


DEFAULT_ALGORITHMS = (
    "ring",  # lossless, but with more than two ranks it adds in another order: shows the effect of rounding alone
    *("flash-int8", "flash-int6", "flash-int6-uniform", "flash-int5", "flash-int4"),
    *("flash:int4-had,int4-had", "flash:int4-sr,int4-sr"),
)
DEFAULT_MODEL = "smollm2-135m"
SEARCH_BYTES_OF = "flash-int6"
SEARCH_TOKENS = 2048
_MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityOptions(OutputOptions):
    model: str = DEFAULT_MODEL
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    world_sizes: tuple[int, ...] = (2, 4, 8)
    text: Path | None = None  # None: the project's own text
    tokens: int = 50_000
    window: int = 512
    batch: int = 4  # windows in a forward pass
    dtype: str = "auto"
    quantization: str = "auto"
    budget: Budget | None = None
    search: str | None = None  # find a mix that sends at most as many bytes as this algorithm
    search_tokens: int = SEARCH_TOKENS  # calibration tokens, in addition to ``tokens``
    write_policy: Path | None = None
    seed: int = 0  # seed of random weights

    def __post_init__(self) -> None:
        for name in (*self.algorithms, *([self.search] if self.search else [])):
            check_name(name)
        if self.search is not None and self.search.startswith(WEIGHTS):
            raise ValueError(f"--search {self.search}: a mix is of AllReduces; name one of those")
        if not self.algorithms:
            raise ValueError("--algorithms is empty; name at least one")
        if repeated := {name for name in self.algorithms if self.algorithms.count(name) > 1}:
            raise ValueError(f"--algorithms names {', '.join(sorted(repeated))} twice")
        if not self.world_sizes or not all(2 <= size <= _MAX_RANKS for size in self.world_sizes):
            given = ", ".join(map(str, self.world_sizes)) or "none"
            raise ValueError(f"--world-sizes takes numbers of ranks from 2 to {_MAX_RANKS}, got {given}")
        if len(set(self.world_sizes)) < len(self.world_sizes):
            raise ValueError("--world-sizes names one twice")
        for flag, value, least in (
            ("--tokens", self.tokens, 1),
            ("--search-tokens", self.search_tokens, 1),
            ("--window", self.window, 16),
            ("--batch", self.batch, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} must be at least {least}, got {value}")
        if self.write_policy is not None:
            if self.budget is None and self.search is None:
                raise ValueError("--write-policy writes what --budget or --search has found; give one of them")
            folder = self.write_policy.parent
            if self.write_policy.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ValueError(
                    f"--write-policy {self.write_policy} cannot be written; name a file in a folder that can"
                )


def parse_options(argv: Sequence[str]) -> QualityOptions:
    """Parse the command line; on an error, print it and exit with status 2."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        if given.search_tokens is not None and given.search is None:
            raise ValueError("--search-tokens says what --search works with; give --search too")
        return QualityOptions(
            model=given.model,
            algorithms=DEFAULT_ALGORITHMS if given.algorithms is None else split_all_reduce_names(given.algorithms),
            world_sizes=_world_sizes(given.world_sizes),
            text=given.text,
            tokens=given.tokens,
            window=given.window,
            batch=given.batch,
            dtype=given.dtype,
            quantization=given.quantization,
            budget=None if given.budget is None else parse_budget(given.budget),
            search=given.search,
            search_tokens=SEARCH_TOKENS if given.search_tokens is None else given.search_tokens,
            write_policy=given.write_policy,
            seed=given.seed,
            output=given.output,
            label=check_label(given.label),
        )
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightwire bench quality",
        description="What quantized AllReduces cost a model in accuracy: perplexity, KL of next tokens, greedy texts, "
        "signal to noise by layer. Ranks are threads, so that any number of them can be had. The last line of stdout is "
        "one JSON object.",
    )
    add = parser.add_argument
    add("model", nargs="?", default=DEFAULT_MODEL, help="as `serve` takes it (%(default)s)")
    add(
        "--algorithms",
        metavar="NAME,NAME",
        help=f"{describe_all_reduce_names()}, policy:FILE, weights:int8 and weights:int4 (as `serve --weight-codec`) ({','.join(DEFAULT_ALGORITHMS)})",
    )
    add("--world-sizes", default="2,4,8", metavar="N,N", help="numbers of ranks (%(default)s)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to judge by (English prose of the project)")
    add(
        "--tokens",
        type=int,
        default=50_000,
        metavar="N",
        help="of the text that is judged, spread over it (%(default)s)",
    )
    add("--window", type=int, default=512, metavar="N", help="tokens that the model sees at a time (%(default)s)")
    add("--batch", type=int, default=4, metavar="N", help="windows in one forward pass (%(default)s)")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="auto: the checkpoint's")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        default="auto",
        help="of the weights, as `serve` takes it (%(default)s)",
    )
    add("--budget", metavar="kl=X|ppl=X%%", help="name the cheapest that loses no more: mean KL in nats, or perplexity")
    add(
        "--search",
        nargs="?",
        const=SEARCH_BYTES_OF,
        metavar="NAME",
        help="find a mix of codecs by layer that sends no more than NAME (%(const)s), and judge it on other windows than "
        "it was found with",
    )
    add(
        "--search-tokens",
        type=int,
        metavar="N",
        help=f"that it is found with: each costs as many passes as the model has AllReduces ({SEARCH_TOKENS})",
    )
    add(
        "--write-policy",
        type=Path,
        metavar="FILE",
        help="keep the cheapest inside the --budget, or without one the --search's mix, for `serve --comm-policy FILE`",
    )
    add("--seed", type=int, default=0, metavar="N", help="of random weights (%(default)s)")
    add_flags(parser, "quality")
    return parser


def _world_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--world-sizes takes numbers of ranks such as 2,4,8, got {text!r}") from None
