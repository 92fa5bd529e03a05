"""A model copied piece by piece: resumed, checked, kept by digest."""

from pathlib import Path

import pytest

from tightwire.model.checkpoint.errors import ModelError
from tightwire.server.hosts import files
from tightwire.server.hosts.files import FileFacts, ModelFiles, fetch_files, list_files, read_piece


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(bytes(range(250)))
    return folder


class Node0:
    """Answers for pieces, and remembers the questions. ``most``: pieces until the connection breaks."""

    def __init__(self, path: Path, most: int = 99) -> None:
        self.path, self.files, self.most = path, list_files(path), most
        self.asked: list[tuple[str, int]] = []

    async def ask(self, name: str, offset: int) -> bytes:
        if len(self.asked) == self.most:
            raise ConnectionResetError
        self.asked.append((name, offset))
        return read_piece(self.path, self.files, name, offset)


async def test_a_folder_is_copied_once(model: Path) -> None:
    node_0, shares = Node0(model), list[float]()
    copy = await fetch_files(node_0.files, node_0.ask, lambda _, share: shares.append(share))
    assert {file.name: file.read_bytes() for file in copy.iterdir() if file.name != ".lock"} == {
        file.name: file.read_bytes() for file in model.iterdir()
    }
    assert shares == sorted(shares) and shares[-1] == 1
    before = len(node_0.asked)
    assert await fetch_files(node_0.files, node_0.ask, lambda *_: None) == copy
    assert len(node_0.asked) == before, "the cache has all"


async def test_an_interrupted_copy_goes_on_where_it_ended(model: Path) -> None:
    broken = Node0(model, most=3)
    with pytest.raises(ModelError, match="cannot be stored"):
        await fetch_files(broken.files, broken.ask, lambda *_: None)
    again = Node0(model)
    await fetch_files(again.files, again.ask, lambda *_: None)
    assert again.asked == [("model.safetensors", 200)]


async def test_a_damaged_file_is_removed_and_named(model: Path) -> None:
    node_0 = Node0(model)
    (model / "model.safetensors").write_bytes(bytes(250))
    with pytest.raises(ModelError, match="model.safetensors arrived damaged and was removed"):
        await fetch_files(node_0.files, node_0.ask, lambda *_: None)


async def test_other_files_are_not_given(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert read_piece(model, list_files(model), "../secret", 0) == b""
    with pytest.raises(ModelError, match="no copy of the model, and node 0 has no file of this model"):
        await fetch_files(list_files(None), Node0(model).ask, lambda *_: None)
    assert ModelFiles([], True).digest != list_files(model).digest


async def test_a_damaged_cache_and_a_damaged_rest_of_a_copy_are_copied_again(model: Path) -> None:
    node_0 = Node0(model)
    copy = await fetch_files(node_0.files, node_0.ask, lambda *_: None)
    weights = copy / "model.safetensors"
    weights.write_bytes(bytes(250))  # the same size, as after a crash of the host
    assert (await fetch_files(node_0.files, node_0.ask, lambda *_: None)) == copy
    assert weights.read_bytes() == bytes(range(250))
    weights.unlink()
    (copy / "model.safetensors.part").write_bytes(bytes(100))
    await fetch_files(node_0.files, node_0.ask, lambda *_: None)
    assert weights.read_bytes() == bytes(range(250))


async def test_hidden_files_are_not_copied_and_files_elsewhere_are_refused(model: Path) -> None:
    (model / ".lock").touch()
    (model / "other.part").touch()
    assert [file.name for file in list_files(model).files] == ["config.json", "model.safetensors"]
    evil = ModelFiles([FileFacts("../../evil", 1, "")], True)
    with pytest.raises(ModelError, match=r"offers files outside the model's folder: \.\./\.\./evil"):
        await fetch_files(evil, Node0(model).ask, lambda *_: None)


def test_the_share_that_is_copied_counts_the_files_before(model: Path) -> None:
    files = list_files(model)
    assert [files.share("config.json", 0), files.share("model.safetensors", 124)] == [0.0, 0.5]


async def test_all_parts_of_a_split_file_are_copied(model: Path) -> None:
    for number in (1, 2):
        (model / f"m-0000{number}-of-00002.gguf").write_bytes(bytes([number]) * 150)
    node_0 = Node0(model / "m-00001-of-00002.gguf")
    copy = await fetch_files(node_0.files, node_0.ask, lambda *_: None)
    assert copy.name == "m-00001-of-00002.gguf" and copy.read_bytes() == bytes([1]) * 150
    assert copy.with_name("m-00002-of-00002.gguf").read_bytes() == bytes([2]) * 150
    (model / "m-00002-of-00002.gguf").unlink()
    assert "cannot read" in list_files(model / "m-00001-of-00002.gguf").error
