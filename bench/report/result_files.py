"""Writes the files of one run into the user's folder: JSON with all raw samples, CSV, an HTML page."""

import argparse
import csv
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from tightwire.comm.atomic_file import write_atomic

KINDS = ("json", "csv", "html")
_MAX_LABEL_CHARS = 100  # a file name has at most 255 bytes, and a date follows
_MOST_RUNS = 100  # of one label in one second


def check_label(label: str) -> str:
    """
    Raises:
        ValueError: no file name can begin with ``label``, or the file would lie outside of ``--output``.
    """
    if not label.isprintable() or "/" in label or not 0 < len(label) <= _MAX_LABEL_CHARS:
        raise ValueError(
            f"--label begins the names of files, so it has 1 to {_MAX_LABEL_CHARS} characters and no slash, got {label!r}; "
            "the folder is --output's"
        )
    return label


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    label: str,
    kept: str = "JSON (raw samples included), CSV and an HTML page",
) -> None:
    """``--output``, where ``kept`` is to be found, and ``--label``."""
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help=f"keep {kept} there")
    add("--label", default=label, metavar="NAME", help="beginning of those files' names (%(default)s)")


class ResultFiles:
    """Files with unique names, each written as a whole.

    The folder is empty before the first write, so a run that measured nothing leaves nothing. Writing again replaces a
    file atomically: a bench that writes after every round loses at most one round in a crash.

    Raises:
        ValueError: the folder cannot be created or written, or a page is wanted and matplotlib is missing; known before
            anything is measured.
    """

    def __init__(self, folder: Path, label: str, kinds: Sequence[str] = KINDS) -> None:
        if "html" in kinds and find_spec("matplotlib") is None:
            raise ValueError(
                "--output draws plots with matplotlib, which is not installed: pip install tightwire[bench]"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"--output {folder} cannot be written: {error}") from error
        self._folder, self._kinds = folder, tuple(kinds)
        self._start = f"{label}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
        self._stem: str | None = None
        self._written: set[str] = set()

    @property
    def paths(self) -> list[str]:
        """The files written so far."""
        return [str(self._path(kind)) for kind in self._kinds if kind in self._written]

    def write_json(self, result: Mapping[str, Any]) -> None:
        self._write("json", json.dumps(result) + "\n")

    def write_csv(self, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        """Keys that are not columns are omitted; None is an empty cell."""
        text = StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        self._write("csv", text.getvalue())

    def write_html(self, page: str) -> None:
        self._write("html", page)

    def _write(self, kind: str, text: str) -> None:
        """Write atomically: neither a reader nor a crash sees half a file.

        Raises:
            ValueError: the file cannot be written.
        """
        if kind not in self._kinds:
            raise ValueError(f"this run keeps {', '.join(self._kinds)}, not {kind}")
        try:
            if self._stem is None:
                self._stem = self._reserve()
            write_atomic(self._path(kind), text.encode())
        except OSError as error:
            raise ValueError(f"the result could not be kept in {self._folder}: {error}") from error
        self._written.add(kind)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self._stem}.{kind}"

    def _reserve(self) -> str:
        """A free name for the files: the first run to create a file has it, so that runs of one second do not collide."""
        for suffix in ("", *(f"-{i}" for i in range(2, _MOST_RUNS))):
            stem = f"{self._start}{suffix}"
            try:
                os.close(
                    os.open(self._folder / f"{stem}.{self._kinds[0]}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
                )
            except FileExistsError:
                continue
            return stem
        raise FileExistsError(f"there are {_MOST_RUNS} results named {self._start} already")
