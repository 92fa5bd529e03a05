"""Sizes that are read without torch."""

import json
import os
from pathlib import Path

import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import Sizes, check_name, read_sizes
from tightwire.model.open import open_checkpoint


@pytest.mark.parametrize("kind", ["folder", "gguf", "folder of a gguf", "random"])
def test_the_sizes_are_those_of_the_opened_model(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        model = str(make_tiny(tmp_path / "tiny"))
    elif kind == "random":
        model = "random:llama-3.2-1b"
    else:
        file = make_tiny_gguf(tmp_path / "tiny.gguf")
        model = str(file if kind == "gguf" else tmp_path)
    config = open_checkpoint(model).config

    assert read_sizes(model) == Sizes(config.num_heads, config.num_layers, config.hidden_size, config.max_positions)


def test_a_model_that_is_not_here_or_damaged_is_left_to_its_opening(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(make_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()[:40])

    assert read_sizes(str(tmp_path / "cut.gguf")) is None
    assert read_sizes("owner/model") is None


@pytest.mark.parametrize("name", ["x" * 300, "owner/" + "x" * 300, "nul\0", "fifo.gguf"])
def test_a_name_that_no_file_folder_or_repo_has(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(ModelError, match="is neither a file nor a folder"):
        check_name(name if "/" in name else str(tmp_path / name))


def test_a_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelError, match=r"several .gguf files, name one: a.gguf, b.gguf"):
        read_sizes(str(tmp_path))


def test_an_unsupported_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ModelError, match="mamba") as caught:
        read_sizes(str(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path}: ")
