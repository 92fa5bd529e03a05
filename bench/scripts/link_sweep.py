"""What a sweep over links says: a row for each link and AllReduce, and where quantizing stops paying."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tightwire.comm.policy.cost import Points
from tightwire.comm.policy.crossover import crossover_rate
from tightwire.comm.policy.setting import Setting

HEAD = (
    "| link (payload rate) | AllReduce | TTFT ms | AllReduce's share | speed-up | by formula | MB over the wire | TTFT / "
    "(computing + wire) | TTFT / (with coding) |\n|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
)


def rows_of(result: dict[str, Any], link: str) -> list[dict[str, Any]]:
    """A row for each AllReduce on one link."""
    wire = result["comm"]["link"]
    rate = wire["measured_bytes_per_s"] or wire["asked_bytes_per_s"]
    cells = {cell["arm"]: cell for cell in result["cells"]}
    rows = []
    for name, cell in cells.items():
        ttft_s, bound = cell["ttft_s"]["p50"], cell["bound"]
        compute_s = cell["parts_s"]["compute_s"]
        best, ratio = cell["best_lossless"], cell["ratio_to_best_lossless"]
        rows.append(
            {
                "link": link,
                "bytes_per_s": rate,
                "emulation": wire["emulation"],
                "arm": name,
                "lossless": cell["lossless"],
                "ttft_s": ttft_s,
                "ttft_n": cell["ttft_s"]["n"],
                "best_lossless": best,
                "is_best_lossless": name == best,
                "share": cell["allreduce_share"],
                "share_of_best_lossless": cells[best]["allreduce_share"] if best else None,
                "speed_up": 1 / ratio["ratio"] if ratio else None,
                "speed_up_low": 1 / ratio["high"] if ratio else None,
                "speed_up_high": 1 / ratio["low"] if ratio else None,
                "formula": _formula(cells[best], cell) if best else None,
                "verdict": ratio["verdict"] if ratio else "",
                "compute_s": compute_s,
                "codec_s": cell["parts_s"]["codec_s"],
                "allreduce_s": cell["parts_s"]["allreduce_s"],
                "server_ttft_s": cell["server_ttft_s"],
                "wire_bytes": bound["wire_bytes"],
                "wire_s": bound["wire_s"],
                "over_bytes_bound": ttft_s / (compute_s + bound["wire_s"]),
                "over_bound": bound["ttft_over_bound"],
            }
        )
    return rows


def _formula(best: dict[str, Any], cell: dict[str, Any]) -> float:
    """1 / (1 - c + c r): what a share c of TTFT, shrunk to r of its bytes, comes to (Flash Communication, 2412.04964)."""
    share = best["allreduce_share"]
    return 1 / (1 - share + share * cell["bound"]["wire_bytes"] / best["bound"]["wire_bytes"])


def measured_crossover(points: Sequence[tuple[float, float]]) -> tuple[float | None, bool]:
    """The rate at which the time saved, ``points`` of (bytes per second, seconds), is zero; and whether it is extrapolated.

    None: it does not change sign between the rates, nor does the line through all of them at a positive rate.
    """
    line = sorted((1 / rate, saved_s) for rate, saved_s in points)
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= 0 < y1:
            return 1 / (x0 - y0 * (x1 - x0) / (y1 - y0)), False
    if len(line) < 2:
        return None, True
    mean_x, mean_y = (sum(values) / len(line) for values in zip(*line, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in line) / sum((x - mean_x) ** 2 for x, _ in line)
    zero = mean_x - mean_y / slope if slope > 0 else 0.0
    return (1 / zero if zero > 0 else None), True


def crossovers(
    rows: Sequence[dict[str, Any]], setting: Setting, message_bytes: int, computing: Points
) -> list[dict[str, Any]]:
    """For each quantized AllReduce the measured and the predicted rate at which it stops paying.

    ``computing``: what `tightwire tune` measured of it on this host; seeds where it did not.
    """
    found = []
    best = {row["link"]: row for row in rows if row["is_best_lossless"]}
    for name in dict.fromkeys(row["arm"] for row in rows if not row["lossless"]):
        own = [row for row in rows if row["arm"] == name and row["link"] in best]
        saved = [(row["bytes_per_s"], best[row["link"]]["ttft_s"] - row["ttft_s"]) for row in own]
        # Of the fastest link: the exact AllReduce that was the best nearest to where it stops paying.
        exact = best[max(own, key=lambda row: row["bytes_per_s"])["link"]]["arm"]
        found.append(crossover_row(name, exact, measured_crossover(saved), setting, message_bytes, computing))
    return found


def crossover_row(
    name: str,
    exact: str,
    measured: tuple[float | None, bool],
    setting: Setting,
    message_bytes: int,
    computing: Points,
) -> dict[str, Any]:
    """One AllReduce against ``exact``: what ``measured_crossover`` found, beside what the cost model says."""
    rate, extrapolated = measured
    predicted = crossover_rate(setting, exact, name, message_bytes, computing=computing)
    return {
        "arm": name,
        "against": exact,
        "measured_bytes_per_s": rate,
        "extrapolated": extrapolated,
        "predicted_bytes_per_s": predicted,
        "predicted_from": "measured computing" if {exact, name} <= computing.keys() else "seeds",
        "off": predicted / rate - 1 if predicted and rate else None,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        speed_up = "-"
        if row["speed_up"] is not None:
            speed_up = f"{row['speed_up']:.2f} ({row['speed_up_low']:.2f} to {row['speed_up_high']:.2f})"
        cells = [
            f"{row['link']} ({row['bytes_per_s'] * 8 / 1e6:.0f} Mbit/s)",
            row["arm"] + (" *" if row["is_best_lossless"] else ""),
            f"{row['ttft_s'] * 1e3:.0f}",
            f"{row['share']:.0%}",
            speed_up,
            "-" if row["formula"] is None else f"{row['formula']:.2f}",
            f"{row['wire_bytes'] / 1e6:.1f}",
            f"{row['over_bytes_bound']:.3f}",
            f"{row['over_bound']:.3f}",
        ]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def show_crossovers(found: Sequence[dict[str, Any]]) -> None:
    sys.stdout.write("\n| stops paying | against | measured Mbit/s | predicted Mbit/s | from | off |\n")
    sys.stdout.write("|---|---|--:|--:|---|--:|\n")
    for row in found:
        rates = [row["measured_bytes_per_s"], row["predicted_bytes_per_s"]]
        texts = ["none" if rate is None else f"{rate * 8 / 1e6:.0f}" for rate in rates]
        texts[0] += " (extrapolated)" if row["extrapolated"] and rates[0] else ""
        off = "-" if row["off"] is None else f"{row['off']:+.0%}"
        sys.stdout.write(f"| {' | '.join([row['arm'], row['against'], *texts, row['predicted_from'], off])} |\n")
