"""The index of suites and helpers in tests/README.md names all there are."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_readme_lists_every_helper_and_every_suite() -> None:
    listed = re.findall(r"^\| ([\w/]+) \|", (TESTS / "README.md").read_text(), re.MULTILINE)
    helpers = {path.relative_to(TESTS).with_suffix("").as_posix() for path in (TESTS / "helpers").rglob("*.py")}
    suites = {f"suites/{path.name}" for path in (TESTS / "suites").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert sorted({*listed} - {"file", "suite"}) == sorted({"harness", "tiny", *helpers, *suites})
