"""Builds the documentation's site: ``make docs``. The pages are README.md and every file that it links to, at the same places.

So a link is right on the site if it is right in the repository. Folders and sources that pages link to are not pages: those links
lead nowhere on the site, and mkdocs leaves them as they are.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md", "docs/architecture.md")
# [text](target) and ![text](target), or src and srcset of an <img> or <source>.
_LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)|src(?:set)?=\"([^\"]+)\"")


def linked_files(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to. Links to other sites and to folders are left out."""
    for link, image in _LINK.findall(page.read_text()):
        target = link or image
        path = (page.parent / target).resolve()
        if "://" not in target and path.is_file() and path.is_relative_to(ROOT):
            yield path


def pages_and_images() -> set[Path]:
    found: set[Path] = set()
    waiting = [ROOT / name for name in FIRST] + sorted((ROOT / "docs").glob("*.md"))
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += linked_files(path) if path.suffix == ".md" else ()
    return found


def main() -> int:
    source = ROOT / "build" / "docs"
    shutil.rmtree(source, ignore_errors=True)
    for path in pages_and_images():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
