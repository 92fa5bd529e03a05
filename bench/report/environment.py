"""Describes the machine, the packages and the checkout of a measurement, so that results can be compared later."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tightwire

_PACKAGES = ("torch", "transformers", "numpy", "httpx", "uvicorn")


def describe_environment() -> dict[str, Any]:
    """Facts about this machine and this checkout; a server under test may run elsewhere."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "os": platform.platform(),
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
        "tightwire": tightwire.__version__,
        "git_revision": git_revision(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "command": _without_secrets(sys.argv),
    }


def without_password(text: str) -> str:
    """``text`` with user and password removed from its URLs."""
    return re.sub(r"://[^/@]*@", "://***@", text)


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """The command line without API keys and passwords, fit to be published."""
    program, *rest = argv or [""]
    if Path(program).name in ("tightwire", "__main__.py"):
        program = "tightwire"  # without the folder of the installation
    shown = [without_password(re.sub(r"^(--api-key=).*", r"\1***", word)) for word in [program, *rest]]
    return ["***" if before == "--api-key" else word for before, word in zip(["", *shown], shown, strict=False)]


def git_revision() -> str | None:
    """The commit of the checkout this code runs from, ``-dirty`` when it has changes; None outside a checkout."""
    # Installed in a virtual environment inside another project, git would report that project's commit.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


def _git(*arguments: str) -> str | None:
    git = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
