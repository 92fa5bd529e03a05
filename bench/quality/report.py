"""Rows, columns, text and page of ``bench quality``: one row for each arm at each world size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from tightwire.bench.quality.items import accuracy
from tightwire.bench.quality.measure import Floats, Measured, Power, Scores, sqnr_db
from tightwire.bench.quality.options import LOSSY_SITES
from tightwire.bench.quality.setting import EXACT, MIX, Arm, Setting, bytes_per_token, exact_arm
from tightwire.bench.report.page import Item, Text
from tightwire.bench.report.plot import lines
from tightwire.bench.report.table import Column, Table

_ALGORITHM = Column("algorithm", "algorithm")
_RANKS = Column("ranks", "world_size", "d")
_SHARE = Column("share of a lossless sum's bytes in --dtype", "bytes_share", ".1%")
_KL = Column("mean KL, nats", "kl_mean", ".1e")
COLUMNS = (
    _ALGORITHM,
    Column("bytes", "bytes_per_token", ",.0f"),
    Column("share", "bytes_share", ".1%"),
    Column("ppl", "perplexity", ".3f"),
    Column("ppl +%", "perplexity_delta", "+.3f", 100),
    Column("±", "perplexity_delta_reach", ".3f", 100),
    Column("KL", "kl_mean", ".1e"),
    Column("KL p99", "kl_p99", ".1e"),
    Column("top-1 %", "top1_agreement", ".2f", 100),
    *(Column(f"{site.removesuffix('_proj')} dB", f"sqnr_db.{site}.total", ".1f") for site in LOSSY_SITES),
)
_ITEM_COLUMNS = (
    Column("items %", "items_right", ".1f", 100),
    Column("items ±", "items_reach", ".1f", 100),
    Column("as exact", "items_as_exact", ".1f", 100),
)
CSV_COLUMNS = (
    _RANKS,
    *COLUMNS,
    *_ITEM_COLUMNS,
    *(Column(key, key) for key in ("perplexity_delta_low", "perplexity_delta_high", "kl_max")),
)
LEGEND = (
    "bytes: sent by a rank for each token of a step, averaged over ranks; share: of a lossless sum's bytes in --dtype; ppl: perplexity, "
    "its rise, and half of the 95 % interval of the rise; KL: KL(exact || algorithm) of next-token distributions in nats, mean "
    "and 99th percentile; top-1: positions with the same most likely token; dB: signal to noise of the sums of o_proj and down_proj; "
    "items: answered rightly, half of the 95 % interval (Wilson), and right or wrong as with exact sums"
)


def make_rows(measured: Measured, arms: Sequence[Arm], setting: Setting) -> list[dict[str, Any]]:
    """Rows in the arms' order. Values not yet measured are None; no rows before the first batch of windows."""
    if not measured.scores:
        return []
    lossless, rows = _bytes(replace(exact_arm(), float32_sums=False), measured, setting), []
    for arm in arms:
        sent, nll, kl = _bytes(arm, measured, setting), *_window_means(measured.scores[arm.name], setting)
        row = {
            "name": f"{arm.name}, {measured.world_size} ranks",
            "world_size": measured.world_size,
            "algorithm": arm.name,
            "bytes_per_token": sent,
            "bytes_share": sent / lossless,
            **_distances(measured.scores[arm.name], measured.scores[EXACT], setting),
            "sqnr_db": _sqnr(measured, arm, setting.config.num_layers),
            **_item_accuracy(measured, arm),
            "samples": {"nll": nll.tolist(), **({"kl": kl.tolist()} if kl.any() else {})},
        }
        rows.append(row)
    return rows


def _item_accuracy(measured: Measured, arm: Arm) -> dict[str, float | None]:
    """The share of items answered rightly, and of those that are right or wrong as with exact sums."""
    right, exact = (measured.items_right.get(name, []) for name in (arm.name, EXACT))
    if not right:
        return dict.fromkeys(("items_right", "items_reach", "items_as_exact", "items_right_exact"))
    share, reach = accuracy(right)
    same = fmean(a == b for a, b in zip(right, exact, strict=False))
    return {"items_right": share, "items_reach": reach, "items_as_exact": same, "items_right_exact": accuracy(exact)[0]}


def _bytes(arm: Arm, measured: Measured, setting: Setting) -> float:
    options, elem_bytes = setting.options, arm.sum_dtype(setting.dtype).itemsize
    rows = options.batch if options.decode else options.window
    return bytes_per_token(arm, setting.config, measured.world_size, rows, elem_bytes)


def _window_means(scores: Scores, setting: Setting) -> tuple[Floats, Floats]:
    """Means of NLL and KL over each window; samples of every token would be a hundred times larger."""
    nll_N, kl_N = (values_T.reshape(-1, setting.windows.num_scored).mean(1) for values_T in scores[:2])
    return nll_N, kl_N


def _distances(scores: Scores, exact: Scores, setting: Setting) -> dict[str, Any]:
    low, high = _interval(_window_means(scores, setting)[0] - _window_means(exact, setting)[0])
    return {
        "tokens": len(scores.nll_T),
        "perplexity": float(np.exp(scores.nll_T.mean())),
        "perplexity_delta": math.expm1(float((scores.nll_T - exact.nll_T).mean())),
        "perplexity_delta_low": low,
        "perplexity_delta_high": high,
        "perplexity_delta_reach": None if low is None or high is None else (high - low) / 2,
        "kl_mean": float(scores.kl_T.mean()),
        "kl_p99": float(np.quantile(scores.kl_T, 0.99)),
        "kl_max": float(scores.kl_T.max()),
        "top1_agreement": float(scores.same_top_T.mean()),
    }


def _interval(nll_delta_N: Floats) -> tuple[float | None, float | None]:
    """Normal 95 % interval of the rise of perplexity; (None, None) for fewer than two windows."""
    if len(nll_delta_N) < 2:
        return None, None
    mean, reach = float(nll_delta_N.mean()), 1.96 * float(nll_delta_N.std(ddof=1)) / math.sqrt(len(nll_delta_N))
    return math.expm1(mean - reach), math.expm1(mean + reach)


def _sqnr(measured: Measured, arm: Arm, num_layers: int) -> dict[str, Any]:
    """Signal-to-noise in dB by site; None without noise. Layers' noise-to-signal ratios are averaged, not their dB."""
    result: dict[str, Any] = {}
    for site in LOSSY_SITES:
        found = [measured.noise.get((arm.algorithm(site, layer), site, layer)) for layer in range(num_layers)]
        powers = [power or Power() for power in found]  # a dropped sum has none
        ratios = [power.noise / power.signal for power in powers if power.signal > 0]
        total = sqnr_db(1.0, fmean(ratios)) if ratios else math.inf
        layers = [_finite(sqnr_db(power.signal, power.noise)) for power in powers]
        result[site] = {"total": _finite(total), "layers": layers}
    return result


def _finite(db: float) -> float | None:
    """``db``, or None where it is infinite, which JSON does not have."""
    return db if math.isfinite(db) else None


def world_size_table(result: Mapping[str, Any], world_size: int) -> Table:
    rows = [row for row in result["cells"] if row["world_size"] == world_size]
    title, columns = f"{world_size} ranks", _columns(rows)
    if rows and (exact := rows[0]["items_right_exact"]) is not None:
        title += f"; exact sums answer {exact:.1%} of the items"
    return Table(title=title, columns=columns, rows=rows)


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns of the table; those of items only where there were any."""
    return (*COLUMNS, *(_ITEM_COLUMNS if any(row["items_right"] is not None for row in rows) else ()))


def describe_setting(facts: Mapping[str, Any]) -> str:
    generated = f"the last {facts['decode']} generated one at a time; " if facts["decode"] else ""
    return (
        f"{facts['model']} in {facts['dtype']}, {facts['weights']}; {facts['tokens']:,} tokens of {facts['text']} in windows of "
        f"{facts['window']}; {generated}"
        "ranks are threads; exact: lossless sums with the same number of ranks"
    )


def findings(result: Mapping[str, Any]) -> list[str]:
    """The chosen arm, and the results of the search."""
    found = []
    if (choice := result["choice"]) is not None:
        found.append(_describe_choice(choice, "--allreduce-decode" if result["decode"] else "--allreduce"))
    if (search := result["search"]) is not None:
        limit = f"at most the bytes of {search['bytes_of']}"
        if search["bytes_of"].startswith("kl="):
            limit = f"the fewest bytes within {search['bytes_of']} ({search['dropped']} sums after attention dropped)"
        found.append(
            f"mix with {limit}, found on {search['tokens']:,} other tokens with "
            f"{search['world_size']} ranks: predicted KL {search['predicted_kl']:.2e}"
        )
    if result["policy_file"]:
        found.append(f"{result['policy_file']} is written: tightwire serve --allreduce policy:{result['policy_file']}")
    return found


def _describe_choice(choice: Mapping[str, Any], option: str) -> str:
    name, sizes = choice["algorithm"], ", ".join(map(str, choice["world_sizes"]))
    within = f"within {choice['budget']} at {sizes} ranks"
    if name is None:
        return f"{within}: none of the measured AllReduces"
    flag = "the mix" if name == MIX else f"{option} {name}"
    return f"{within}, the cheapest is {flag}"


def make_sections(result: Mapping[str, Any]) -> list[Item]:
    rows = result["cells"]
    sizes = sorted({row["world_size"] for row in rows})
    items: list[Item] = [Text(title="Findings", lines=found)] if (found := findings(result)) else []
    for size in sizes:
        note = "Lower is more exact, further left sends less. Without algorithms that are exact."
        own = [row for row in rows if row["world_size"] == size and row["kl_mean"] > 0]
        title = f"KL against bytes, {size} ranks"
        items.append(lines(title, own, by="algorithm", x=_SHARE, y=_KL, log_x=False, joined=False, note=note))
    every = [row for size in sizes for row in world_size_table(result, size).rows]
    return [*items, Table(title="All cells", columns=[_RANKS, *_columns(every)], rows=every, note=LEGEND)]
