"""The imports between the modules of a package, read from its source text: no module is imported, and no package is needed.

An import counts wherever it stands: at the top of a file, inside a function or under ``TYPE_CHECKING``.
"""

import ast
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

Graph = Mapping[str, AbstractSet[str]]  # each module, and the modules of the package that it imports


def read_graph(files: Mapping[str, Path]) -> Graph:
    """The graph of ``files``: a path for each module name. A package has the name of its folder."""
    return {module: frozenset(_imported(module, path, files.keys())) for module, path in files.items()}


def _imported(module: str, path: Path, known: AbstractSet[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [_longest(f"{node.module}.{alias.name}", node.module, known) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name in known and name != module)


def _longest(attribute: str, module: str, known: AbstractSet[str]) -> str:
    """``from module import name`` imports a module of that name, or else takes a name out of ``module``."""
    return attribute if attribute in known else module


def circles(graph: Graph) -> Iterator[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
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

    for module in sorted(graph):
        if module not in index:
            yield from visit(module)


def folder_graph(graph: Graph) -> Graph:
    """The imports between the folders of each floor. A file that stands beside them counts as a folder."""
    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        parts = module.split(".")
        if len(parts) < 3:
            continue
        own = folders.setdefault(".".join(parts[:3]), set())
        for other in imported:
            target = other.split(".")
            if len(target) > 2 and target[1] == parts[1] and target[2] != parts[2]:
                own.add(".".join(target[:3]))
    return folders
