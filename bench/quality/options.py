"""Options of ``tightwire bench quality``, and the accuracy budget that they may name."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tightwire.bench.options import OutputOptions, known_model
from tightwire.comm.all_reduce.names import (
    describe_all_reduce_names,
    main_preset_names,
    split_all_reduce_names,
    split_name,
)
from tightwire.comm.policy.rules import read_policy_file
from tightwire.model.weights import QUANTIZATIONS, WEIGHT_CODECS
from tightwire.option import option

POLICY = "policy:"  # an arm that uses a policy file
WEIGHTS = "weights:"  # an arm with exact sums and encoded weights
# An arm with exact sums; packed weights are multiplied with activations in 8 bits.
INT8_ACTIVATIONS = "activations:int8"
KV_CACHES = ("kv:int8", "kv:bfloat16", "kv:float32")  # arms with exact sums and a KV cache in that dtype
SPEC = "spec:"  # an arm with a format of another project, for comparison; no server offers it
LOSSY_SITES = ("o_proj", "down_proj")
RING = f"{SPEC}ring-"
_COMPARED = re.compile(SPEC + r"(amd-int[46](-rows)?|(uniform|affine|ring)-int[2-8])")
_FORMATS = f"{SPEC}amd-int6, {SPEC}amd-int4, {SPEC}uniform-intB, {SPEC}affine-intB or {RING}intB (a ring that encodes every hop)"
_BUDGET = re.compile(r"(kl)=([0-9.eE+-]+)|(ppl)=([0-9.eE+-]+)%")
_MAX_RANKS = 64
_LEAST_PROMPT = 8  # tokens of a window before those of --decode
_ALGORITHMS = (
    "two-shot",  # lossless: what messages in --dtype cost
    "ring",  # lossless, but it rounds the sum at every hop
    *main_preset_names(),
    "flash-int8-plain",
    "flash-int4-plain",
)


@dataclass(frozen=True, slots=True)
class Budget:
    """The allowed accuracy loss: ``kind`` is ``kl`` (mean nats) or ``ppl`` (relative increase)."""

    text: str
    kind: str
    limit: float

    def allows(self, row: Mapping[str, Any]) -> bool:
        """True if an arm's ``row`` is within the budget; for perplexity, if the upper end of its interval is."""
        if self.kind == "kl":
            return row["kl_mean"] <= self.limit
        high = row["perplexity_delta_high"]
        return (row["perplexity_delta"] if high is None else high) <= self.limit

    def cheapest(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The arm with the fewest bytes, then the smallest KL, within the budget at every world size; or None."""
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            by_name.setdefault(row["algorithm"], []).append(row)
        costs = {
            name: (sum(row["bytes_per_token"] for row in own), sum(row["kl_mean"] for row in own))
            for name, own in by_name.items()
            if all(map(self.allows, own))
        }
        return min(costs, key=lambda name: costs[name], default=None)


def parse_budget(text: str) -> Budget:
    """Parse ``kl=0.01`` or ``ppl=0.1%``; raise ValueError for anything else."""
    match = _BUDGET.fullmatch(text.strip())
    try:
        limit = float(match[2] or match[4]) if match else math.nan
    except ValueError:
        limit = math.nan
    if match is None or not 0 <= limit < math.inf:
        raise ValueError(f"{text!r} is not a budget; write kl=0.01 (mean KL in nats) or ppl=0.1% (rise of perplexity)")
    return Budget(text, "kl", limit) if match[1] else Budget(text, "ppl", limit / 100)


def is_compared(name: str) -> bool:
    """True if ``name`` is a format of another project, such as ``spec:amd-int6``."""
    return _COMPARED.fullmatch(name) is not None


def parse_names(text: str) -> tuple[str, ...]:
    for name in (names := split_all_reduce_names(text)):
        check_name(name)
    return names


def _parse_search(text: str) -> str:
    if text.startswith((WEIGHTS, INT8_ACTIVATIONS, *KV_CACHES, SPEC)):
        raise ValueError(f"a mix consists of AllReduces; name an AllReduce, got {text!r}")
    (parse_budget if text.startswith("kl=") else check_name)(text)
    return text


def check_name(name: str) -> None:
    """Raise ValueError if ``name`` is not a valid arm, as far as this can be checked without a model."""
    codecs = [f"{WEIGHTS}{codec}" for codec in WEIGHT_CODECS if codec != "none"]
    if name in (*codecs, INT8_ACTIVATIONS, *KV_CACHES):
        return
    algorithm, at, site = name.partition("@")
    if at and not name.startswith(POLICY):
        if site not in LOSSY_SITES:
            raise ValueError(f"{name!r} is at no site; write {algorithm}@{f' or {algorithm}@'.join(LOSSY_SITES)}")
        name = algorithm
    if is_compared(name):
        return
    if name.startswith(SPEC):
        raise ValueError(f"{name!r} is not a format to compare with; use {_FORMATS}")
    if name.startswith(WEIGHTS):
        raise ValueError(f"{name!r} is not a weight codec; use {' or '.join(codecs)}")
    if name.startswith(POLICY):
        read_policy_file(Path(name.removeprefix(POLICY)))
    elif name.partition(":")[0] == "hierarchical":
        raise ValueError(
            f"{name!r} sums between nodes, but these ranks are on one node; measure its quantized exchange as "
            "flash:CODEC,CODEC with one rank for each node"
        )
    else:
        split_name(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityOptions(OutputOptions):
    description: ClassVar[str] = (
        "Measure the accuracy that quantized AllReduces cost a model: perplexity, KL and agreement of next-token distributions, "
        "signal to noise by layer. Ranks are threads, so any number of them is possible."
    )
    model: str = option("smollm2-135m", "as for serve", flag="model", parse=known_model)
    algorithms: tuple[str, ...] = option(
        _ALGORITHMS,
        f"what to measure: {describe_all_reduce_names()}, {POLICY}FILE, {WEIGHTS}int8 or {WEIGHTS}int4 (weights encoded as by "
        f"`serve --weight-codec`), {INT8_ACTIVATIONS} (in products with the layers' packed weights), {KV_CACHES[0]} "
        f"(--kv-cache-dtype), to compare with what no server sends {_FORMATS}; "
        f"NAME@{LOSSY_SITES[0]} or NAME@{LOSSY_SITES[1]}: quantized only there",
        parse=parse_names,
    )
    world_sizes: tuple[int, ...] = option((2,), "numbers of ranks")
    text: Path | None = option(None, "UTF-8 text to measure on (default: English prose of the project)", metavar="FILE")
    tokens: int = option(12_288, "tokens to measure on, spread over the text", least=1)
    window: int = option(512, "tokens of context: the text is cut into windows of N tokens", least=16)
    decode: int = option(
        0,
        "compute the last N tokens of a window one at a time, as generated ones, with the AllReduces only there, and measure these",
        metavar="N",
        least=0,
    )
    items: int = option(
        0,
        "cloze and multiple-choice items that every arm answers as well, from prose, code and chat, the same in every run; 300 "
        "tell 5 % from 10 %",
        least=0,
    )
    batch: int = option(4, "windows in one forward pass", least=1)
    dtype: str = option("auto", "of activations; auto: the checkpoint's", choices=("auto", "bfloat16", "float32"))
    quantization: str = option("auto", "of the weights, as for serve", choices=QUANTIZATIONS)
    budget: Budget | None = option(
        None,
        "name the cheapest AllReduce that loses at most this: mean KL in nats, or rise of perplexity",
        metavar="kl=X|ppl=X%",
        parse=parse_budget,
    )
    search: str | None = option(
        None,
        "find the best mix of codecs by layer that sends at most the bytes of NAME (without NAME: flash-int6), or for kl=X the one of "
        "the fewest bytes within that mean KL, which may also drop sums after attention; measure it on other windows than the "
        "search used",
        metavar="NAME|kl=X",
        const="flash-int6",
        parse=_parse_search,
    )
    search_tokens: int = option(1024, "tokens for --search; each is computed twice for every layer", least=1)
    write_policy: Path | None = option(
        None,
        "write the result of --budget (else of --search) to FILE for `serve --allreduce policy:FILE`",
        metavar="FILE",
    )
    seed: int = option(0, "seed of random weights")

    @property
    def search_kl(self) -> float | None:
        """The KL that ``--search kl=X`` allows, or None where the search has a limit of bytes."""
        return parse_budget(self.search).limit if self.search and self.search.startswith("kl=") else None

    def __post_init__(self) -> None:
        for flag, values in (("--algorithms", self.algorithms), ("--world-sizes", self.world_sizes)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{flag} takes different values, got {','.join(map(str, values)) or 'none'}")
        if not all(2 <= size <= _MAX_RANKS for size in self.world_sizes):
            raise ValueError(f"--world-sizes must be 2 to {_MAX_RANKS}, got {','.join(map(str, self.world_sizes))}")
        if self.decode and (self.search is not None or self.items or self.write_policy is not None):
            raise ValueError("--decode measures generated tokens; leave --search, --items and --write-policy out")
        if self.decode > self.window - _LEAST_PROMPT:
            raise ValueError(f"--decode must leave {_LEAST_PROMPT} of --window {self.window} tokens, got {self.decode}")
        if self.write_policy is not None:
            if self.budget is None and self.search is None:
                raise ValueError("--write-policy writes the result of --budget or --search; give one of them")
            folder = self.write_policy.parent
            if self.write_policy.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ValueError(f"--write-policy {self.write_policy} cannot be written; name another file")
