"""Draws signal to noise and KL against bits from results of ``tightwire bench quality``, and prints them as a table.

python -m tightwire.bench.quality.front OUT.svg RESULT.json RESULT.json ...

The noise on Gaussian numbers is computed here, that of partial sums and the KL stand in the results, of which the first one
with an algorithm counts.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tightwire.bench.quality.compared import compared
from tightwire.bench.quality.measure import sqnr_db
from tightwire.bench.quality.options import is_compared
from tightwire.bench.quality.setting import LOSSY_SITES
from tightwire.bench.report.plot import Plot, make_log, series_color, svg
from tightwire.comm.all_reduce.make import parse_all_reduce

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 512  # of Gaussian numbers
_FAMILIES = {  # with their markers
    "Tightwire": "o",
    "article (groups of 128)": "s",
    "AMD": "^",
    "AMD, exponent for each row": "v",
    "uniform (one scale a row)": "D",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One algorithm: bits for a number, with scales, and signal to noise of Gaussian numbers and of each sum."""

    name: str
    bits: float  # mean of the model's sums, of which the first layer's and the last may have another codec
    codec_bits: float
    gaussian_db: float
    sums_db: Sequence[float]
    kl: float
    perplexity: float  # relative rise

    @property
    def family(self) -> str:
        if self.name.startswith("spec:uniform"):
            return "uniform (one scale a row)"
        if is_compared(self.name):
            return "AMD, exponent for each row" if self.name.endswith("-rows") else "AMD"
        return "article (groups of 128)" if self.name.endswith("-plain") or ":" in self.name else "Tightwire"


def read_points(results: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The quantized algorithms of the results, at the first one's first number of ranks."""
    world_size, points = results[0]["world_sizes"][0], dict[str, Point]()
    for result in results:
        for row in result["cells"]:
            name, sums = row["algorithm"], [db for site in LOSSY_SITES for db in row["sqnr_db"][site]["layers"]]
            if name in points or row["world_size"] != world_size or None in sums:
                continue
            points[name] = Point(
                name=name,
                bits=16 * row["bytes_share"],
                codec_bits=codec_bits(name, result["hidden_size"]),
                gaussian_db=gaussian_db(name, world_size, result["hidden_size"]),
                sums_db=sums,
                kl=row["kl_mean"],
                perplexity=row["perplexity_delta"],
            )
    return sorted(points.values(), key=lambda point: (list(_FAMILIES).index(point.family), -point.bits))


def codec_bits(name: str, row_elems: int) -> float:
    """Mean of both legs, for a number of a row, with scales."""
    if is_compared(name):
        return 8 * compared(name).row_bytes(row_elems, 2) / row_elems
    codecs = parse_all_reduce(name).codecs
    return 8 * sum(codec.wire_bytes(codec.group_elems, 2) / codec.group_elems for codec in codecs) / len(codecs)


def gaussian_db(name: str, world_size: int, row_elems: int) -> float:
    """Signal to noise of one sum of Gaussian numbers, (512, ``row_elems``) on each rank, in float32."""
    parts = torch.randn(world_size, _ROWS, row_elems, generator=torch.Generator().manual_seed(0))
    total = _through(name, torch.stack([_through(name, part, 0) for part in parts]).sum(0), -1)
    exact = parts.sum(0)
    return sqnr_db(float(exact.square().sum()), float((total - exact).square().sum()))


def _through(name: str, x_TD: Tensor, leg: int) -> Tensor:
    if is_compared(name):
        return compared(name).through(x_TD)
    codec, x_N = parse_all_reduce(name).codecs[leg], x_TD.reshape(-1)
    return codec.decode(codec.encode(x_N), x_N.numel(), torch.float32).view(x_TD.shape)


def draw(points: Sequence[Point], title: str) -> str:
    """SVG: signal to noise on the left, of sums (filled, median) and Gaussian numbers (open); KL on the right."""

    def each(axes: "Axes", bits: str, value: Callable[[Point], float], **style: Any) -> None:
        for number, (family, marker) in enumerate(_FAMILIES.items()):
            own = [point for point in points if point.family == family]
            how = {"color": series_color(number), "marker": marker, "markersize": 5, **style}
            axes.plot([getattr(point, bits) for point in own], [value(point) for point in own], label=family, **how)
        axes.set(xlabel="bits a number, with scales")

    def left(axes: "Axes") -> None:
        each(axes, "bits", lambda point: median(point.sums_db))
        handles = list(axes.get_lines())
        each(axes, "codec_bits", lambda point: point.gaussian_db, linestyle=":", fillstyle="none")
        for line in axes.get_lines()[len(handles) :]:
            line.set_label("_")
        axes.set(ylabel="signal to noise of one AllReduce, dB")

    def right(axes: "Axes") -> None:
        each(axes, "bits", lambda point: point.kl)
        make_log(axes, "y")
        axes.set(ylabel="mean KL of next tokens, nats")

    return svg(Plot(title="median of the model's sums; dotted: Gaussian", draw=left), Plot(title=title, draw=right))


def table(points: Sequence[Point]) -> str:
    """The points as a table of a Markdown page."""
    lines = [
        "| name | codec's bits | mean bits | Gaussian, dB | sums: median, dB | worst, dB | KL | more, % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for point in points:
        db = (f"{value:.1f}" for value in (point.gaussian_db, median(point.sums_db), min(point.sums_db)))
        more = f"{100 * point.perplexity:+.2f}" if point.perplexity < 10 else "> 1000"
        cells = [point.name, f"{point.codec_bits:.2f}", f"{point.bits:.2f}", *db, f"{point.kl:.2g}", more]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(out: Path, paths: Sequence[Path]) -> None:
    results = [json.loads(path.read_text()) for path in paths]
    points, first = read_points(results), results[0]
    out.write_text(
        draw(points, f"{first['model']}, {first['world_sizes'][0]} ranks, {first['cells'][0]['tokens']:,} tokens")
    )
    sys.stdout.write(table([point for point in points if math.isfinite(point.gaussian_db)]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
