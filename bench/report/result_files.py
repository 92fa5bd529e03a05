"""Writes the files of one run into the user's folder: JSON with all raw samples, CSV, an HTML page."""

import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tightwire.whole_folder import write_atomic

_MAX_LABEL_CHARS = 100  # a file name has at most 255 bytes, and a date follows


def check_label(label: str) -> str:
    """Raises ValueError if no file name can begin with ``label``, or the file would lie outside of ``--output``."""
    if not label.isprintable() or "/" in label or not 0 < len(label) <= _MAX_LABEL_CHARS:
        raise ValueError(
            f"--label begins the names of files: it needs 1 to {_MAX_LABEL_CHARS} characters and no slash, got {label!r}; "
            "the folder is --output's"
        )
    return label


class ResultFiles:
    """Uniquely named files, written atomically; ValueError before that if the folder is unusable."""

    def __init__(self, folder: Path, label: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"--output {folder} cannot be written: {error}") from error
        self._folder, self._start = folder, f"{label}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
        self._stem: str | None = None
        self._paths: dict[str, Path] = {}

    @property
    def paths(self) -> list[str]:
        return list(map(str, self._paths.values()))

    def write(self, kind: str, text: str) -> None:
        """Write, or replace, the file with the extension ``kind``; raises ValueError if that fails."""
        try:
            self._stem = self._stem or self._reserve(kind)
            path = self._folder / f"{self._stem}.{kind}"
            write_atomic(path, text.encode())
        except OSError as error:
            raise ValueError(f"the result could not be written to {self._folder}: {error}") from error
        self._paths[kind] = path

    def _reserve(self, kind: str) -> str:
        """A free name; the run that creates its first file owns it, so runs of the same second do not collide."""
        stem, number = self._start, 1
        while True:
            try:
                (self._folder / f"{stem}.{kind}").touch(exist_ok=False)
                return stem
            except FileExistsError:
                number += 1
                stem = f"{self._start}-{number}"
