"""Documents: what parts them, which are held out, in which order an epoch has them, and files that are none."""

import gzip
from collections import Counter
from pathlib import Path

import pytest
from helpers.training.training_runs import make_config

from tightwire.training.data.documents import (
    DataError,
    Documents,
    RunData,
    find_files,
    fingerprint_of,
    is_held_out,
)


def test_blank_lines_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one\nstill one\n\n\ntwo\n")
    assert list(Documents(files=(tmp_path / "text.txt",))) == ["one\nstill one\n", "two\n"]


def test_a_file_can_be_one_document(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one\n\ntwo\n")
    (tmp_path / "blank.txt").write_text("\n \n")
    assert list(Documents(files=find_files([f"{tmp_path}/*.txt"]), parted_by="file")) == ["one\n\ntwo\n"]


def test_lines_of_json_are_documents_compressed_or_not(tmp_path: Path) -> None:
    lines = '{"body": "one"}\n\n{"body": "two"}\n{"body": ""}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    assert list(Documents(files=find_files([f"{tmp_path}/*"]), text_key="body")) == ["one", "two"] * 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{oops\n', r"a.jsonl:2: is not valid JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"a.jsonl:1: has no text under 'text' \(found: body\); set data.text_key"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\\ud83d"}\n',
            r"a.jsonl:2: is not valid JSON: .* surrogates not allowed",
        ),
        ("a.jsonl", b'{"text": "x", "\\ud83d": 1}\n', r"a.jsonl:1: is not valid JSON: .* surrogates not allowed"),
        ("a.jsonl", b"1" * 5000, "a.jsonl:1: is not valid JSON: .*digits"),
        ("a.jsonl", b"[" * 200_000, "a.jsonl:1: is not valid JSON: .*recursion"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.txt.gz", b"not compressed", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:10] + b"\xff" * 8, "cannot be read: Error -3"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(Documents(files=(tmp_path / name,)))


@pytest.mark.parametrize("name", ["a.json", "A.JSON", "a.json.gz"])
def test_json_is_not_learned_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('[{"text": "one"}]')
    with pytest.raises(DataError, match=f"{name} is JSON, and data.kind=text reads text and JSON lines; give .jsonl"):
        Documents(files=(tmp_path / name,))
    assert Documents(files=(tmp_path / name,), kind="chat").files


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.jsonl.GZ"])
def test_json_lines_have_several_endings(tmp_path: Path, name: str) -> None:
    content = b'{"text": "one"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    assert list(Documents(files=(tmp_path / name,))) == ["one"]


def test_a_pattern_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file matches"):
        find_files([f"{tmp_path}/*.txt"])


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("b.jsonl", '{"text": "two"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(Documents(files=find_files([f"{tmp_path}/*"]))) == ["one", "two"]


def test_the_path_of_a_file_is_no_pattern(tmp_path: Path) -> None:
    for name in ("text[1].txt", "text1.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files([f"{tmp_path}/text[1].txt"])] == ["text[1].txt"]
    (tmp_path / "text[1].txt").unlink()
    assert [path.name for path in find_files([f"{tmp_path}/text[1].txt"])] == ["text1.txt"]


def test_the_prose_that_comes_with_the_package_has_a_name() -> None:
    assert [path.stem for path in find_files(["english-prose"])] == ["emma", "jargon", "opticks", "tom_sawyer"]


def test_a_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    before = fingerprint_of([path])
    assert fingerprint_of([path]) == before
    path.write_text("xy")
    assert fingerprint_of([path]) != before


def _documents(tmp_path: Path) -> Documents:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(f"file {number} document {i}" for i in range(40)))
    return Documents(files=find_files([f"{tmp_path}/*.txt"]))


def _run_data(tmp_path: Path, documents: Documents, *overrides: str) -> RunData:
    config = make_config(tmp_path, "data.shuffle_documents=16", *overrides)
    return RunData(config=config, documents=documents, held_out_documents=None)


def test_an_epoch_has_every_document_once_in_its_own_order(tmp_path: Path) -> None:
    documents = _documents(tmp_path)

    def epoch(number: int, seed: int = 0) -> list[str]:
        return list(_run_data(tmp_path, documents, f"seed={seed}", "data.held_out=0").training(number))

    assert epoch(0) == epoch(0)
    assert len({tuple(order) for order in (epoch(0), epoch(1), epoch(0, seed=1), list(documents))}) == 4
    assert Counter(epoch(0)) == Counter(epoch(1)) == Counter(documents)


def test_the_held_out_share_is_never_trained_on(tmp_path: Path) -> None:
    documents = _documents(tmp_path)
    kept = set(_run_data(tmp_path, documents, "data.held_out=0.2").training(0))
    held_out = {text for text in documents if is_held_out(text, 0.2)}

    assert kept | held_out == set(documents) and not kept & held_out
    assert 20 <= len(held_out) <= 60  # 40 of 200 in the mean; the texts are fixed
