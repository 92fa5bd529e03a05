"""Counts the source tree and fails when it breaks a rule of the layout: ``make house``, which needs Python alone.

Prints files, lines and folders of each floor, then every fault: a floor above its budget, a folder with too many files, a file
that is too long, a test that mirrors no file, import circles, upward imports, module docstrings that begin with a question
word, and modules named in strings. docs/architecture.md says what the floors are, and why the budget is fixed.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from import_graph import Graph, circles, folder_graph, read_graph

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (("bench",), ("server", "training"), ("model",), ("comm",), ("kernels",))  # from the top down
# Lines of Python and C++. A feature that does not fit makes room first: the numbers do not follow the code.
BUDGET = {"bench": 11_000, "server": 16_400, "training": 8_400, "model": 9_000, "comm": 7_800, "kernels": 10_000}
MAX_FOLDER_FILES, MAX_FILE_LINES = 20, 400
MIRRORED = {"package": "src/tightwire"}  # folders of tests whose names differ from what they test
UNMIRRORED = ("contracts", "deploy", "gpu", "suites")
# The only files that name modules as text: the tables of verbs, and the registry of AllReduces.
MODULE_TABLES = ("src/tightwire/__main__.py", "bench/cli.py", "comm/all_reduce/names.py", "comm/all_reduce/make.py")
MODULE_TEXT = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)+(:[A-Za-z_]\w*)?")
QUESTIONS = ("What", "Where", "Whether", "How", "Why", "Which", "Who", "Whence", "When")


class Tree(NamedTuple):
    """The files of a checkout, relative to its root, with their text: ``sources`` outside tests, ``tests`` in Python."""

    root: Path
    sources: Mapping[Path, str]
    tests: Mapping[Path, str]


def read_tree(root: Path) -> Tree:
    tops = [root / name for name in BUDGET]
    own = [path for path in (root / "src" / "tightwire").glob("*.py") if path.is_file()]
    sources = own + [path for top in tops for path in top.rglob("*") if path.suffix in (".py", ".cpp", ".h")]

    def texts(paths: Sequence[Path]) -> Mapping[Path, str]:
        return {path.relative_to(root): path.read_text() for path in sorted(paths)}

    return Tree(root, texts(sources), texts(list((root / "tests").rglob("*.py"))))


def module_name(path: Path) -> str:
    """The name that a Python file of the tree is imported by."""
    parts = path.with_suffix("").parts
    parts = parts[2:] if parts[:2] == ("src", "tightwire") else parts
    return ".".join(("tightwire", *(part for part in parts if part != "__init__")))


def import_graph(tree: Tree) -> Graph:
    return read_graph({module_name(path): tree.root / path for path in tree.sources if path.suffix == ".py"})


def num_lines(text: str) -> int:
    return text.count("\n")


def lines_by_floor(tree: Tree) -> Counter[str]:
    counts = Counter[str]()
    for path, text in tree.sources.items():
        counts[path.parts[0]] += num_lines(text)
    return counts


def over_budget(tree: Tree) -> Iterator[str]:
    for floor, lines in lines_by_floor(tree).items():
        if floor in BUDGET and lines > BUDGET[floor]:
            yield f"{floor}/ has {lines} lines; at most {BUDGET[floor]}: delete, merge or reuse before you add"


def full_folders(tree: Tree) -> Iterator[str]:
    for folder, count in Counter(path.parent for path in (*tree.sources, *tree.tests)).items():
        if count > MAX_FOLDER_FILES:
            yield f"{folder}/ holds {count} files; at most {MAX_FOLDER_FILES}: group those with one idea in a folder"


def long_files(tree: Tree) -> Iterator[str]:
    for path, text in tree.sources.items():
        if num_lines(text) > MAX_FILE_LINES:
            yield f"{path} has {num_lines(text)} lines; at most {MAX_FILE_LINES}: split it by idea"


def stray_tests(tree: Tree) -> Iterator[str]:
    """Tests that mirror no file: their name is not that of a file or folder of the same place, with or without a suffix."""
    for path in tree.tests:
        place, name = path.parts[1], path.stem.removeprefix("test_")
        if name == path.stem or place in UNMIRRORED:
            continue
        folder = tree.root / MIRRORED.get(place, place) / Path(*path.parts[2:-1])
        stems = [file.stem.strip("_") for file in folder.iterdir()] if folder.is_dir() else []
        if not any(name == stem or name.startswith(f"{stem}_") for stem in stems):
            yield f"{path} mirrors no file: give it a file's name, or move it to tests/suites"


def import_circles(graph: Graph) -> Iterator[str]:
    yield from (f"circle of files: {', '.join(group)}" for group in circles(graph))
    yield from (f"circle of folders: {', '.join(group)}" for group in circles(folder_graph(graph)))


def upward_imports(graph: Graph) -> Iterator[str]:
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for module, imported in graph.items():
        for other in imported:
            a, b = (name.split(".")[1] if "." in name else "" for name in (module, other))
            if a != b and a in level and b in level and level[b] <= level[a]:
                yield f"{module} imports {other}"


def odd_docstrings(tree: Tree) -> Iterator[str]:
    for path, text in tree.sources.items():
        if path.suffix == ".py":
            first = (ast.get_docstring(ast.parse(text)) or "").partition(" ")[0].rstrip(",:")
            if not first or first in QUESTIONS:
                yield f"{path}: the module docstring must begin with what the module is or does"


def named_modules(tree: Tree) -> Iterator[str]:
    """Modules named in a string, which the linter cannot follow: "package.module", "module:attribute", or a computed name."""
    advice = "import it, inside a function if it must load late"
    for path, text in tree.sources.items():
        if path.suffix != ".py" or str(path) in MODULE_TABLES:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(tree.root, node.value):
                yield f"{path}:{node.lineno} names the module {node.value!r} in a string: {advice}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "import_module",
                "__import__",
            ):
                yield f"{path}:{node.lineno} imports a module by its name: {advice}"


def _is_module(root: Path, text: str) -> bool:
    if not MODULE_TEXT.fullmatch(text):
        return False
    top, *parts = text.partition(":")[0].split(".")
    return ":" in text or (
        top == "tightwire" and any((root.joinpath(*parts)).with_suffix(end).exists() for end in ("", ".py"))
    )


def faults(tree: Tree) -> Iterator[str]:
    """Everything that breaks a rule, one line each."""
    graph = import_graph(tree)
    yield from over_budget(tree)
    yield from full_folders(tree)
    yield from long_files(tree)
    yield from stray_tests(tree)
    yield from import_circles(graph)
    yield from upward_imports(graph)
    yield from odd_docstrings(tree)
    yield from named_modules(tree)


def table(tree: Tree) -> Iterator[str]:
    """Files and lines of each floor beside its budget, its largest folder and its longest file."""
    yield f"{'':10}{'files':>7}{'lines':>8}{'budget':>8}{'median':>8}   largest folder, longest file"
    floors: dict[str, list[Path]] = {}
    for path in tree.sources:
        floors.setdefault(path.parts[0], []).append(path)
    for floor, paths in floors.items():
        lines = {path: num_lines(tree.sources[path]) for path in paths}
        folder, count = Counter(path.parent for path in paths).most_common(1)[0]
        longest, sizes = max(lines, key=lines.__getitem__), sorted(lines.values())
        yield (
            f"{floor:10}{len(paths):7}{sum(sizes):8}{BUDGET.get(floor, ''):>8}{sizes[len(sizes) // 2]:8}   "
            f"{folder} {count}, {longest} {lines[longest]}"
        )
    yield f"{'all':10}{len(tree.sources):7}{sum(map(num_lines, tree.sources.values())):8}{sum(BUDGET.values()):8}"
    yield f"{'tests':10}{len(tree.tests):7}{sum(map(num_lines, tree.tests.values())):8}"


def main() -> int:
    tree = read_tree(ROOT)
    wrong = list(faults(tree))
    sys.stdout.write("\n".join([*table(tree), *(wrong or ["no fault"])]) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)  # circles() goes as deep as imports do
    sys.exit(main())
