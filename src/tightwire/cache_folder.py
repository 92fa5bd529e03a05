"""The folder in which every floor keeps what it fetched or measured."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/tightwire``, or ``~/.cache/tightwire``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tightwire"
