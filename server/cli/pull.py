"""Runs ``tightwire pull``: fetches a model of the catalog into the cache folder."""

import argparse
import sys
from collections.abc import Sequence

from tightwire.model.checkpoint import catalog
from tightwire.progress import Progress
from tightwire.server.cli.start import refuse


def pull(argv: Sequence[str]) -> int:
    """``tightwire pull``: the file's path on standard output; exit code 1 if it cannot be fetched."""
    parser = argparse.ArgumentParser(prog="tightwire pull", description="Fetch a known model into the cache folder.")
    names = sorted(catalog.CATALOG)
    known = f"one of {', '.join(names)} (default: %(default)s)"
    parser.add_argument("name", nargs="?", default="smollm2-135m", choices=names, metavar="NAME", help=known)
    name = parser.parse_args(argv).name
    progress = Progress()
    try:
        path = catalog.pull(name, progress=lambda fraction: progress.stage(f"downloading {name}", fraction))
    except ValueError as error:
        return refuse("pull", error, exit_code=1)
    finally:
        progress.close()
    sys.stdout.write(f"{path}\n")
    return 0
