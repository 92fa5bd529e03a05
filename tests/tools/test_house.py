"""Each rule of ``make house``, on small trees that break it and on this one."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import house
import pytest
from house import BUDGET, MAX_FILE_LINES, MAX_FOLDER_FILES, Tree

GOOD = '"""Adds numbers."""\n'


def _tree(root: Path, texts: Mapping[str, str]) -> Tree:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return house.read_tree(root)


def _faults(root: Path, **texts: str) -> list[str]:
    return list(house.faults(_tree(root, {name.replace("__", "/") + ".py": text for name, text in texts.items()})))


def test_a_tree_within_the_rules_has_no_fault(tmp_path: Path) -> None:
    assert _faults(tmp_path, comm__a=GOOD, model__b=GOOD + "import tightwire.comm.a\n", tests__comm__test_a="") == []


@pytest.mark.parametrize("floor", BUDGET)
def test_a_floor_may_fill_its_budget_and_not_exceed_it(floor: str, tmp_path: Path) -> None:
    def lines(count: int) -> dict[str, str]:
        return {f"{floor}/folder{at}/a.py": GOOD + "\n" * 99 for at in range(count // 100)}

    assert list(house.faults(_tree(tmp_path, lines(BUDGET[floor])))) == []
    over = _tree(tmp_path, {f"{floor}/one_more.py": GOOD})
    assert list(house.faults(over)) == [
        f"{floor}/ has {BUDGET[floor] + 1} lines; at most {BUDGET[floor]}: delete, merge or reuse before you add"
    ]


@pytest.mark.parametrize("folder", ["comm/codec", "tests/comm/codec"])
def test_a_folder_holds_at_most_twenty_files(folder: str, tmp_path: Path) -> None:
    files = {f"{folder}/a{at}.py": GOOD for at in range(MAX_FOLDER_FILES)}
    assert list(house.faults(_tree(tmp_path, files))) == []
    assert list(house.faults(_tree(tmp_path, {f"{folder}/b.py": GOOD}))) == [
        f"{folder}/ holds 21 files; at most 20: group those with one idea in a folder"
    ]


@pytest.mark.parametrize("name", ["model/a.py", "kernels/cpu/a.cpp", "kernels/cpu/a.h"])
def test_a_file_may_not_be_too_long(name: str, tmp_path: Path) -> None:
    assert list(house.faults(_tree(tmp_path, {name: GOOD + "\n" * (MAX_FILE_LINES - 1)}))) == []
    assert list(house.faults(_tree(tmp_path, {name: GOOD + "\n" * MAX_FILE_LINES}))) == [
        f"{name} has {MAX_FILE_LINES + 1} lines; at most {MAX_FILE_LINES}: split it by idea"
    ]


@pytest.mark.parametrize(
    ("test", "is_stray"),
    [
        ("tests/comm/codec/test_codec.py", False),
        ("tests/comm/codec/test_codec_fuzz.py", False),
        ("tests/comm/test_codec.py", False),  # of the folder
        ("tests/comm/codec/conftest.py", False),
        ("tests/suites/comm/test_stress.py", False),
        ("tests/package/test_sizes.py", False),
        ("tests/package/test_main.py", False),
        ("tests/comm/codec/test_code.py", True),
        ("tests/comm/gone/test_codec.py", True),
        ("tests/test_codec.py", True),
    ],
)
def test_a_test_mirrors_a_file_or_is_a_suite(test: str, is_stray: bool, tmp_path: Path) -> None:
    tree = _tree(
        tmp_path,
        {"comm/codec/codec.py": GOOD, "src/tightwire/sizes.py": GOOD, "src/tightwire/__main__.py": GOOD, test: ""},
    )
    expected = [f"{test} mirrors no file: give it a file's name, or move it to tests/suites"] if is_stray else []
    assert list(house.faults(tree)) == expected


def test_circles_of_files_and_of_folders(tmp_path: Path) -> None:
    found = _faults(
        tmp_path,
        comm__x__a=GOOD + "from tightwire.comm.y import b\n",
        comm__y__b=GOOD + "def f():\n    from tightwire.comm.x.c import g\n",
        comm__x__c=GOOD + "import tightwire.comm.x.d\n",
        comm__x__d=GOOD + "import tightwire.comm.x.c\n",
    )
    assert found == [
        "circle of files: tightwire.comm.x.c, tightwire.comm.x.d",
        "circle of folders: tightwire.comm.x, tightwire.comm.y",
    ]


@pytest.mark.parametrize(
    ("importer", "imported", "is_fault"),
    [
        ("comm", "model", True),
        ("server", "training", True),
        ("training", "bench", True),
        ("bench", "server", False),
        ("model", "kernels", False),
    ],
)
def test_a_floor_imports_those_below_it(importer: str, imported: str, is_fault: bool, tmp_path: Path) -> None:
    texts = {f"{importer}__a": GOOD + f"from tightwire.{imported} import b\n", f"{imported}__b": GOOD}
    expected = [f"tightwire.{importer}.a imports tightwire.{imported}.b"] if is_fault else []
    assert _faults(tmp_path, **texts) == expected


@pytest.mark.parametrize("text", ["", '"""What adds numbers."""\n', '"""How: by adding."""\n'])
def test_a_docstring_begins_with_what_the_module_is(text: str, tmp_path: Path) -> None:
    assert _faults(tmp_path, comm__a=text) == [
        "comm/a.py: the module docstring must begin with what the module is or does"
    ]


def _command(root: Path) -> Iterator[str]:
    """The lines that the command prints with an interpreter that finds no installed package."""
    yield from subprocess.run(
        [sys.executable, "-S", "-E", root / "tools" / "house.py"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.splitlines()


def test_this_tree_has_no_fault_and_the_command_needs_no_package() -> None:
    *table, last = _command(house.ROOT)
    assert last == "no fault"
    assert {line.split()[0] for line in table[1:]} >= BUDGET.keys()


def test_the_budget_is_the_one_in_the_docs() -> None:
    lines = (house.ROOT / "docs" / "architecture.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| kernels | comm |"))
    floors, numbers = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[at], lines[at + 2]))
    assert {floor: int(number.replace(",", "")) for floor, number in zip(floors, numbers, strict=True)} == BUDGET


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('NAME = "tightwire.comm.a"', "names the module 'tightwire.comm.a' in a string"),
        ('NAME = "comm.a:Ring"', "names the module 'comm.a:Ring' in a string"),
        ('NAME = "tightwire.comm.a:Ring"', "names the module 'tightwire.comm.a:Ring' in a string"),
        ('import_module("tightwire." + name)', "imports a module by its name"),
        ('importlib.import_module(f"tightwire.{name}")', "imports a module by its name"),
        ('NAME = "tightwire.request.id"', ""),
        ('NAME = "tightwire.comm.a/1"', ""),
        ('NAME = "127.0.0.1:8000"', ""),
        ('NAME = "see tightwire.comm.a"', ""),
    ],
)
def test_a_module_is_named_in_no_string_outside_the_tables(line: str, fault: str, tmp_path: Path) -> None:
    found = _faults(tmp_path, comm__a=GOOD, model__b=GOOD + line + "\n", src__tightwire____main__=GOOD + line + "\n")
    assert (found == []) if not fault else [fault in text for text in found] == [True], found
    assert all(text.startswith("model/b.py:2 ") for text in found)
