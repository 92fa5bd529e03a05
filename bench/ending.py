"""How a run of a bench ends: what went wrong on stderr, the files, and one line of JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tightwire.bench.report.result_files import ResultFiles


def say(verb: str, words: str) -> None:
    """Of ``tightwire bench VERB``, on stderr."""
    sys.stderr.write(f"tightwire bench {verb}: {words}\n")


def finish(
    verb: str,
    error: str | None,
    result: Callable[[str | None], Mapping[str, Any]],
    files: ResultFiles | None,
    keep: Callable[[ResultFiles, str | None], None],
) -> str | None:
    """Keep what there is and print it on one line.

    Args:
        error: why the result cannot be trusted or is not complete; None: it can, and is.
        result: what the line says, with the error it is given; without raw samples.
        files: None: nothing is to be kept, or there is nothing.
        keep: writes them, with the error it is given.
    Returns:
        ``error``, and that the files could not be written.
    """
    if files is not None:
        try:
            keep(files, error)
        except ValueError as unwritable:
            say(verb, str(unwritable))
            error = "; ".join(filter(None, [error, str(unwritable)]))
    paths = [] if files is None else files.paths
    sys.stdout.write(json.dumps({**result(error), "files": paths}) + "\n")
    sys.stdout.flush()
    return error
