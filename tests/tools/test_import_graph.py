"""The imports between modules, read from text."""

from pathlib import Path

from import_graph import circles, folder_graph, read_graph


def _graph(folder: Path, **texts: str) -> dict[str, set[str]]:
    files = {name.replace("__", "."): folder / f"{name}.py" for name in texts}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return {module: set(imported) for module, imported in read_graph(files).items()}


def test_an_import_counts_in_every_form_and_place(tmp_path: Path) -> None:
    graph = _graph(
        tmp_path,
        p="",
        p__a="import p.b\nfrom p import c\nfrom p.d import name\nimport os\n",
        p__b="def f():\n    from p import c\n",
        p__c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.d import D\n",
        p__d='text = "import p.a"\n',
    )
    assert graph == {"p": set(), "p.a": {"p.b", "p.c", "p.d"}, "p.b": {"p.c"}, "p.c": {"p.d"}, "p.d": set()}


def test_circles_are_found_once_each_and_not_where_there_is_none() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["d", "e"]]
    assert list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})) == []


def test_folders_of_one_floor_import_each_other_and_files_beside_them_count_as_folders() -> None:
    graph = {"t.low.x.a": {"t.low.y.b", "t.low.x.c"}, "t.low.y.b": {"t.low.top"}, "t.low.top": {"t.high.z"}}
    assert folder_graph(graph) == {"t.low.x": {"t.low.y"}, "t.low.y": {"t.low.top"}, "t.low.top": set()}
