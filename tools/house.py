"""Counts the source tree and fails when it breaks the layout's limits: ``make house``.

Prints files, lines and folders of each floor, then everything that is against the rules: folders with too many files, import circles,
upward imports, and module docstrings that begin with a question word. docs/architecture.md says what the floors are.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (("bench",), ("server", "training"), ("model",), ("comm",), ("kernels",))  # from the top down
# The reorganization ended at 45,600 lines. Constrained answers, tools, several hosts, Responses and Messages came after it.
MAX_LINES, MAX_FILES, MAX_FOLDER = 56_200, 440, 20
QUESTIONS = ("What", "Where", "Whether", "How", "Why", "Which", "Who", "Whence", "When")


def source_files() -> list[Path]:
    """Every Python and C++ file outside tests."""
    tops = [ROOT / name for floor in FLOORS for name in floor]
    own = [path for path in (ROOT / "src" / "tightwire").glob("*.py") if path.is_file()]
    return sorted(own + [path for top in tops for path in top.rglob("*") if path.suffix in (".py", ".cpp", ".h")])


def circles(graph: grimp.ImportGraph) -> Iterator[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module):
            if other not in index:
                yield from visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                yield sorted(group)

    for module in sorted(graph.modules):
        if module not in index:
            yield from visit(module)


def folder_graph(graph: grimp.ImportGraph) -> grimp.ImportGraph:
    """The imports between the folders of each floor (a file that stands beside them counts as itself)."""
    folders = grimp.ImportGraph()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            a, b = module.split("."), other.split(".")
            if len(a) > 2 and len(b) > 2 and a[1] == b[1] and a[2] != b[2]:
                folders.add_import(importer=".".join(a[:3]), imported=".".join(b[:3]))
    return folders


def upward_imports(graph: grimp.ImportGraph) -> Iterator[str]:
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            a, b = (name.split(".")[1] if "." in name else "" for name in (module, other))
            if a != b and a in level and b in level and level[b] <= level[a]:
                yield f"{module} imports {other}"


def module_docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def faults(files: list[Path], num_lines: int) -> Iterator[str]:
    """Everything that breaks a rule, one line each."""
    if num_lines > MAX_LINES:
        yield f"{num_lines} lines outside tests; at most {MAX_LINES}"
    if len(files) > MAX_FILES:
        yield f"{len(files)} files outside tests; at most {MAX_FILES}"
    all_files = [*files, *(ROOT / "tests").rglob("*.py")]
    for folder, count in Counter(path.parent for path in all_files).items():
        if count > MAX_FOLDER:
            yield f"{folder.relative_to(ROOT)} holds {count} files; at most {MAX_FOLDER}"
    graph = grimp.build_graph("tightwire", cache_dir=None)
    yield from (f"circle of files: {', '.join(group)}" for group in circles(graph))
    yield from (f"circle of folders: {', '.join(group)}" for group in circles(folder_graph(graph)))
    yield from upward_imports(graph)
    for path in files:
        if path.suffix == ".py":
            first = module_docstring(path).partition(" ")[0].rstrip(",:")
            if not first or first in QUESTIONS:
                yield f"{path.relative_to(ROOT)}: the module docstring must begin with what the module is or does"


def main() -> int:
    files = source_files()
    lines = {path: path.read_text().count("\n") for path in files}
    by_floor: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files:
        by_floor[path.relative_to(ROOT).parts[0]].append(path)
    table = [f"{'':10}{'files':>7}{'lines':>8}{'median':>8}   largest folder, longest file"]
    for floor, paths in by_floor.items():
        folder, count = Counter(path.parent for path in paths).most_common(1)[0]
        longest = max(paths, key=lines.__getitem__)
        sizes = sorted(lines[path] for path in paths)
        table.append(
            f"{floor:10}{len(paths):7}{sum(sizes):8}{sizes[len(sizes) // 2]:8}   "
            f"{folder.relative_to(ROOT)} {count}, {longest.relative_to(ROOT)} {lines[longest]}"
        )
    tests = list((ROOT / "tests").rglob("*.py"))
    table.append(f"{'all':10}{len(files):7}{sum(lines.values()):8}")
    table.append(f"{'tests':10}{len(tests):7}{sum(path.read_text().count(chr(10)) for path in tests):8}")
    wrong = list(faults(files, sum(lines.values())))
    sys.stdout.write("\n".join([*table, *(wrong or ["no fault"])]) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    sys.exit(main())
