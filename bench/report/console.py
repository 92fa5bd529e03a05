"""The console on which a bench prints its tables."""

from rich.console import Console

_FILE_WIDTH = 120  # columns in a file or a pipe


def make_console() -> Console:
    """As wide as the terminal; in a file or a pipe rich would otherwise cut tables to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
