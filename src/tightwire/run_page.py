"""Reads and shortens the log of a training run, and writes its page, ``run.html``: every logged figure over the steps, and the answers that were
learned from, if any.

One file without scripts, fonts or links to elsewhere; it needs no package.
"""

import html
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tightwire.whole_folder import write_atomic

PAGE = "run.html"
LOG, SAMPLES = "metrics.jsonl", "samples.jsonl"
_SMOOTHING = 0.95  # weight of the previous mean
_FIRST = ("reward", "held_out_reward", "kl", "loss", "held_out_loss")  # the others follow in the log's order
_NOT_DRAWN = ("step", "tokens", "samples", "seconds", "mfu", "memory_bytes", "wire_bytes", "exposed_ms")
_MOST_STEPS = 12  # of which answers are shown: the first ones and the last ones
_WIDTH, _HEIGHT, _LEFT, _UNDER = 432, 170, 64, 20
_MOST_CHARACTERS = 9  # left of the lines; more would begin outside of the chart
_STYLE = """:root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;max-width:1320px;margin:24px auto;padding:0 16px}
h1{font-size:22px}h2{font-size:17px}.charts{display:flex;flex-wrap:wrap;gap:16px}figure{margin:0}figcaption{font-weight:600}
svg{max-width:100%;height:auto}svg text{fill:currentColor;font-size:11px}.grid{stroke:currentColor;opacity:.18}.each{fill:none;stroke:#4a90d9;opacity:.45}
.mean{fill:none;stroke:#2a6fc0;stroke-width:2}.last{fill:#2a6fc0}
@media(prefers-color-scheme:dark){.each{opacity:.7}.mean{stroke:#8cc2f7}.last{fill:#8cc2f7}}table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:4px 8px;border-bottom:1px solid #8884}td:nth-child(n+3){text-align:right}
td{white-space:pre-wrap;overflow-wrap:anywhere}summary{cursor:pointer;padding:4px 0}"""


def write_page(run: Path) -> Path | None:
    """Write the page from the run's log and samples. Returns None if the log has no steps. Raises OSError."""
    lines = read_log(run / LOG)
    if not lines:
        return None
    samples = read_log(run / SAMPLES) if (run / SAMPLES).exists() else []
    title = html.escape(f"{run.name}: {lines[-1]['step']} steps")
    charts = "".join(_chart(name, points) for name, points in _curves(lines).items())
    note = "Thin: every step. Bold: the running mean. The dot is the last value, which stands behind the name."
    body = f"<h1>{title}</h1><p>{note}</p><div class=charts>{charts}</div>{''.join(_answers(samples))}"
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title><style>{_STYLE}</style>"
    write_atomic(run / PAGE, f"<!doctype html><html lang=en>{head}{body}</html>\n".encode())
    return run / PAGE


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the records up to the first line that is incomplete or invalid."""
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            break
        values.append(value)
    return values


def drop_after(path: Path, step: int) -> None:
    """Remove the lines of later steps."""
    if not path.exists():
        return
    kept = [json.dumps(values) + "\n" for values in read_log(path) if values["step"] <= step]
    write_atomic(path, "".join(kept).encode())


def add_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append the records. Raises OSError: the disk failed; the file is as before."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError:
        if path.is_file():
            os.truncate(path, size)
        raise


def smooth(losses: Sequence[float]) -> list[float]:
    """The running mean of the numbers so far."""
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smoothed.append(mean / (1 - _SMOOTHING**number))  # removes the bias of starting at 0
    return smoothed


def _curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    names = dict.fromkeys([*_FIRST, *(name for line in lines for name in line)])
    curves = {
        name: [(line["step"], float(line[name])) for line in lines if _is_finite(line.get(name))]
        for name in names
        if name not in _NOT_DRAWN
    }
    return {name: points for name, points in curves.items() if points}


def _is_finite(figure: Any) -> bool:
    """False for NaN and infinity: a loss that has no number has no point, and the others keep their scale."""
    return isinstance(figure, int | float) and math.isfinite(figure)


def _chart(name: str, points: Sequence[tuple[int, float]]) -> str:
    """The points, the last of them as a dot, which a single one needs to be seen, and their running mean."""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    middle = (high + low) / 2
    half = (high - low) / 2 or abs(middle) * 0.1 or 1.0

    def place(step: int, value: float) -> str:
        across = (step - steps[0]) / max(steps[-1] - steps[0], 1)
        up = (value - middle + half) / (2 * half)
        return f"{_LEFT + across * (_WIDTH - _LEFT - 8):.1f},{8 + (1 - up) * (_HEIGHT - 8 - _UNDER):.1f}"

    each = " ".join(place(*point) for point in points)
    mean = " ".join(place(*point) for point in zip(steps, smooth(values), strict=True))
    heights = (8, 8 + (_HEIGHT - 8 - _UNDER) / 2, _HEIGHT - _UNDER)
    grid = "".join(
        f"<line class=grid x1={_LEFT} x2={_WIDTH - 8} y1={at} y2={at} /><text x={_LEFT - 6} y={at + 4} text-anchor=end>{text}</text>"
        for at, text in zip(heights, _marks(middle + half, middle, middle - half), strict=True)
    )
    ends = f"<text x={_LEFT} y={_HEIGHT - 4}>step {steps[0]}</text><text x={_WIDTH - 8} y={_HEIGHT - 4} text-anchor=end>{steps[-1]}</text>"
    lines = f"<polyline class=each points='{each}' /><polyline class=mean points='{mean}' />"
    across, up = each.split()[-1].split(",")
    lines += f"<circle class=last cx={across} cy={up} r=3 />"
    label = html.escape(f"{name.replace('_', ' ')} {values[-1]:.4g}")
    return (
        f"<figure><figcaption>{label}</figcaption><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width={_WIDTH} height={_HEIGHT} role=img "
        f"aria-label='{label}'>{grid}{ends}{lines}</svg></figure>"
    )


def _marks(*values: float) -> list[str]:
    """The numbers beside the lines of a chart, with as many digits as tell them apart, at most those that fit."""
    texts = [[f"{value:.{digits}g}" for value in values] for digits in range(3, 8)]
    fitting = [each for each in texts if max(map(len, each)) <= _MOST_CHARACTERS] or texts[:1]
    return next((each for each in fitting if len({*each}) == len(each)), fitting[-1])


def _answers(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A folded table for each of some steps; the newest is open."""
    steps = sorted({sample["step"] for sample in samples})
    shown = steps if len(steps) <= _MOST_STEPS else steps[: _MOST_STEPS // 2] + steps[-_MOST_STEPS // 2 :]
    if shown:
        yield f"<h2>Answers</h2><p>Of {len(shown)} of {len(steps)} rollouts, the newest first; all are in {SAMPLES}.</p>"
    for step in reversed(shown):
        own = sorted((sample for sample in samples if sample["step"] == step), key=lambda sample: -sample["reward"])
        mean = math.fsum(sample["reward"] for sample in own) / len(own)
        rows = "".join(
            f"<tr><td>{html.escape(str(sample['prompt'][-1]['content']))}<td>{html.escape(sample['answer'])}"
            f"<td>{sample['reward']:.3g}<td>{sample['tokens']}{'' if sample['ended'] else ' (cut)'}"
            for sample in own
        )
        opened = " open" if step == shown[-1] else ""
        yield f"<details{opened}><summary>step {step}: {len(own)} answers, mean reward {mean:.3g}</summary>"
        yield f"<table><tr><th>prompt<th>answer<th>reward<th>tokens{rows}</table></details>"
