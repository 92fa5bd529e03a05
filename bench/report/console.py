"""Where a bench prints its tables."""

from rich.console import Console

_FILE_WIDTH = 120  # of lines that go to a file or a pipe


def make_console() -> Console:
    """As wide as the terminal; a table in a file or a pipe must not be cut to a terminal that is not there."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
