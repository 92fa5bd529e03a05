"""Shows what a start is doing, on standard error: a line that counts on a terminal, now and then a line elsewhere; and imports."""

import contextlib
import gc
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

_TICK_S = 0.2
_FIRST_LINE_S, _LINE_PERIOD_S = 2.0, 10.0  # elsewhere than on a terminal: of one stage
_BAR_CHARS = 20

# The stages of a start in order, each with how long it usually takes.
START_STAGES = {
    "import": "importing PyTorch, usually 2 to 5 s",
    "open": "reading the model's headers, usually below 1 s",
    "join": "connecting the ranks, usually below 1 s",
    "self-test": "testing AllReduces, usually 1 s (new GPU: 60 s)",
    "weights": "loading weights, files at disk speed",
    "warm-up": "answering test requests, usually 1 s",
}


@contextmanager
def importing() -> Iterator[None]:
    """Do not look for garbage until the block ends: what it imports stays, and looking takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def spinner(text: str, environment: Mapping[str, str]) -> AbstractContextManager[object]:
    """Show ``text`` and the time it takes. ``environment``: has RANK under torchrun; other ranks than 0 show nothing."""
    if not sys.stderr.isatty() or environment.get("RANK", "0") != "0":
        return nullcontext()
    from rich.console import Console  # only who shows it imports it
    from rich.progress import Progress as Spinner
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Spinner(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(text, total=None)
    return progress


class Progress:
    """The stages of ``num_ranks`` ranks, of which the slowest is shown. ``stages``: those that share one bar."""

    def __init__(
        self,
        num_ranks: int = 1,
        stages: Mapping[str, str] | None = None,
        *,
        stream: TextIO | None = None,
        verbose: bool = False,
    ) -> None:
        self._num_ranks, self._stages, self._verbose = num_ranks, stages or {}, verbose
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._ticker: threading.Thread | None = None
        self._order: list[str] = list(self._stages)
        self._done: dict[str, dict[int, float]] = {}  # by stage and rank, the fraction done
        self._begun_s: dict[str, float] = {}
        self._shown, self._since_s, self._line_s = "", 0.0, 0.0

    def say(self, text: str) -> None:
        """Write a line. Ignores a closed pipe (`serve 2>&1 | head`), which is no reason to stop serving."""
        with self._lock:
            self._write(f"{self._erase}{text}\n")

    def detail(self, text: str) -> None:
        """Write a line for ``--log-level debug``."""
        if self._verbose:
            self.say(text)

    def stage(self, name: str, fraction: float, rank: int = 0) -> None:
        """Report the ``fraction`` of a stage that a rank has done."""
        with self._lock:
            if name not in self._order:
                self._order.append(name)
            done, now_s = self._done.setdefault(name, {}), time.monotonic()
            begun_s = self._begun_s.setdefault(name, now_s)
            done[rank] = fraction
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick_until_closed, daemon=True)
                self._ticker.start()
            if fraction >= 1 and len(done) == self._num_ranks and min(done.values()) >= 1:
                self.detail(f"{name:>12}  {now_s - begun_s:5.1f} s")

    def close(self) -> None:
        """End the display; ``say`` still works."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._write(self._erase)
        if self._ticker is not None:
            self._ticker.join()

    def tick(self, now_s: float) -> None:
        """Show the earliest stage that a rank has begun and not ended."""
        with self._lock:
            unfinished = [name for name in self._order if any(done < 1 for done in self._done.get(name, {}).values())]
            if self._closed.is_set() or not unfinished:
                return
            name = unfinished[0]
            if name != self._shown:
                self._shown, self._since_s, self._line_s = name, now_s, now_s + _FIRST_LINE_S
            if self._live:
                self._write(self._erase + self._text(name, now_s)[: shutil.get_terminal_size().columns - 1])
            elif now_s >= self._line_s:
                self._line_s = now_s + _LINE_PERIOD_S
                self._write(self._text(name, now_s) + "\n")

    def _text(self, name: str, now_s: float) -> str:
        done = min(self._done[name].values())
        total = done
        if name in self._stages:
            total = (self._order.index(name) + done) / len(self._stages)
        filled = round(total * _BAR_CHARS)
        percent = f" {100 * done:.0f} %," if done else ""
        bar = f"[{'#' * filled:.<{_BAR_CHARS}}]"
        return f"{bar} {self._stages.get(name, name)}:{percent} {now_s - self._since_s:.0f} s"

    @property
    def _erase(self) -> str:
        return "\r\x1b[K" if self._live and self._ticker is not None else ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed file raises ValueError
            self._stream.write(text)
            self._stream.flush()

    def _tick_until_closed(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.tick(time.monotonic())


class Speed:
    """The pace of one answer, from the moment it was asked for."""

    def __init__(self) -> None:
        self._begun_s, self._first_s, self._last_s, self._num_tokens = time.monotonic(), 0.0, 0.0, 0

    def count(self, num_tokens: int) -> None:
        """Note tokens that have just arrived."""
        self._last_s = time.monotonic() - self._begun_s
        self._first_s = self._first_s if self._num_tokens else self._last_s
        self._num_tokens += num_tokens

    def describe(self, num_tokens: int | None = None) -> str:
        """One line. ``num_tokens``: as the server counted them, where a part of a stream may hold several."""
        tokens = self._num_tokens if num_tokens is None else num_tokens
        rate = f", {(tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s" if self._last_s > self._first_s else ""
        return f"{tokens} token{'' if tokens == 1 else 's'}{rate}, first after {1e3 * self._first_s:.0f} ms"


class StepBar:
    """Lines above the bar of a run of ``steps`` steps; the bar is shown on a terminal alone."""

    def __init__(self, steps: int, *, done: int = 0, is_quiet: bool = False, stream: TextIO | None = None) -> None:
        """``done``: steps so far. ``is_quiet``: show nothing. ``stream``: instead of standard error."""
        from rich.console import Console  # only who shows it imports it
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._console = Console(file=stream or sys.stderr, quiet=is_quiet)
        columns = BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        has_bar = self._console.is_terminal and not is_quiet
        self._bars = Bars(*columns, console=self._console, transient=True, disable=not has_bar)
        self._task = self._bars.add_task("", total=steps, completed=done)
        self._bars.start()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def move(self, done: int, text: str) -> None:
        """Show that so many steps are done, and ``text`` beside the bar."""
        self._bars.update(self._task, completed=done, description=text)

    def close(self) -> None:
        """Remove the bar. ``say`` still works."""
        self._bars.stop()
