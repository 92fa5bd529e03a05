"""A run's page: its curves lie inside their charts, answers are escaped, and lines that are cut off do not break it."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tightwire.run_page import LOG, PAGE, SAMPLES, add_lines, drop_after, read_log, write_page


class _Checker(HTMLParser):
    """Counts tags, and fails on what a page of this kind may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img") and not {"src", "href"} & {name for name, _ in attrs}
        self.tags.append(tag)


def _write(run: Path, *, steps: int) -> None:
    lines = [
        {"step": n, "loss": 3.0 - n / 10, "reward": 0.5, "kl": 1e-9 * n, "lr": 1e-3, "seconds": 2.0}
        for n in range(1, steps + 1)
    ]
    (run / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    prompt = [{"role": "user", "content": "as <b>JSON</b> & more"}]
    samples = [
        {"step": n, "prompt": prompt, "answer": f"<script>{k}", "reward": k / 4, "tokens": 7, "ended": k > 0}
        for n in range(1, steps + 1)
        for k in range(3)
    ]
    (run / SAMPLES).write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def test_figures_are_drawn_inside_their_charts_with_reward_and_kl_first(tmp_path: Path) -> None:
    _write(tmp_path, steps=20)

    page = write_page(tmp_path)

    assert page == tmp_path / PAGE
    text = (tmp_path / PAGE).read_text()
    names = re.findall(r"<figcaption>([a-z ]+) ", text)
    assert names == ["reward", "kl", "loss", "lr"]
    for points in re.findall(r"points='([^']+)'", text):
        places = [tuple(map(float, point.split(","))) for point in points.split()]
        assert len(places) == 20 and all(64 <= x <= 424 and 8 <= y <= 150 for x, y in places)
        assert places == sorted(places)
    dots = re.findall(r"<circle class=last cx=([\d.]+) cy=([\d.]+) r=3 />", text)
    ends = re.findall(r"class=each points='[^']*?([\d.]+),([\d.]+)'", text)
    assert dots == ends and len(dots) == 4 and "Bold: the running mean." in text


def test_a_figure_with_one_value_is_seen(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0, "held_out_loss": 2.5}\n')
    write_page(tmp_path)
    assert "<circle class=last cx=64.0 cy=79.0 r=3 />" in (tmp_path / PAGE).read_text()


def test_numbers_beside_a_chart_of_a_small_range_differ(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 2.345 + n / 1000, "tokens_per_s": 15_217.0 + n, "reward": 0.25 * n} for n in range(3)]
    for n, line in enumerate(lines):
        line["lr"] = 3e-4 - n * 1e-10
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))

    text = write_page(tmp_path).read_text()  # pyright: ignore[reportOptionalMemberAccess]

    marks = re.findall(r"y=[0-9.]+ text-anchor=end>([^<]+)</text>(?=<line|<text x=64)", text)
    assert marks == ["0.5", "0.25", "0", "2.347", "2.346", "2.345", "15219", "15218", "15217", *["0.0003"] * 3]


def test_answers_are_escaped_sorted_and_of_the_first_and_last_steps(tmp_path: Path) -> None:
    _write(tmp_path, steps=20)

    text = write_page(tmp_path).read_text()  # pyright: ignore[reportOptionalMemberAccess]

    checker = _Checker()
    checker.feed(text)
    assert "svg{max-width:100%" in text  # a chart is wider than a phone
    assert checker.tags.count("svg") == 4 and checker.tags.count("details") == 12
    shown = [int(step) for step in re.findall(r"<summary>step (\d+): 3 answers, mean reward 0.25", text)]
    assert shown == [20, 19, 18, 17, 16, 15, 6, 5, 4, 3, 2, 1]
    assert re.findall(r"script&gt;(\d)", text)[:3] == ["2", "1", "0"]
    assert "as &lt;b&gt;JSON&lt;/b&gt; &amp; more" in text and text.count("(cut)") == 12


def test_a_run_without_steps_has_no_page(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("")
    assert write_page(tmp_path) is None and not (tmp_path / PAGE).exists()
    _write(tmp_path, steps=1)
    (tmp_path / SAMPLES).unlink()
    assert "<h2>" not in write_page(tmp_path).read_text()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_figure_that_is_no_number_is_left_out_of_its_curve(tmp_path: Path) -> None:
    losses = [3.0, float("inf"), float("nan"), 2.0]
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (tmp_path / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_page(tmp_path)
    assert page is not None
    text = page.read_text()
    [each] = re.findall(r"<polyline class=each points='([^']*)'", text)
    assert len(each.split()) == 2 and "loss 2<" in text
    assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize("line", [b'{"step": 2, \xff', b'{"step": "2"}'])
def test_a_damaged_log_is_read_up_to_the_damage(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / LOG
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    drop_after(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_lines_that_a_full_disk_cuts_off_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SAMPLES
    add_lines(path, [{"step": 1}])
    given: list[dict[str, object]] = [{"step": 2, "answer": "x" * 100_000}, {"step": 2, "answer": object()}]
    monkeypatch.setattr(json, "dumps", _fails_at(given[1]))
    with pytest.raises(OSError, match="No space left"):
        add_lines(path, given)
    assert read_log(path) == [{"step": 1}] and path.read_text() == '{"step": 1}\n'


def _fails_at(bad: object) -> Callable[[object], str]:
    write = json.dumps

    def dumps(value: object) -> str:
        if value is bad:
            raise OSError(28, "No space left on device")
        return write(value)

    return dumps
