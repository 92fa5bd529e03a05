"""Imports of large packages, and what a terminal shows meanwhile."""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext


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
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(text, total=None)
    return progress
