"""The exported folder: several files where there is much, nothing half done, and every rank to the end whatever happens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.open import open_checkpoint
from tightwire.training.config.tree import ModelConfig, ShapeConfig
from tightwire.training.start.export import check_out, export_folder
from tightwire.training.start.model import StartingModel, open_starting_model, train_bpe

_SHAPE = ShapeConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


@pytest.fixture
def start(tmp_path: Path) -> StartingModel:
    return open_starting_model(ModelConfig(shape=_SHAPE), seed=0, keep_in=tmp_path / "tokenizer", texts=list)


def _tensors(start: StartingModel, given: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, _ in expected_tensors(start.config):
        given.append(name)
        yield name, start.read(name)


@pytest.mark.parametrize(("file_bytes", "num_files"), [(1 << 30, 1), (20_000, 5)])
def test_the_folder_opens_with_the_same_weights(
    tmp_path: Path, start: StartingModel, file_bytes: int, num_files: int
) -> None:
    out = tmp_path / "runs" / "model"
    export = {"dtype": torch.float32, "writes": True, "file_bytes": file_bytes}
    assert export_folder(out, _tensors(start, []), start.config, start.tokenizer, **export) == ""

    assert len(list(out.glob("*.safetensors"))) == num_files
    assert {path.stat().st_mode & 0o444 for path in out.iterdir()} == {(out / "config.json").stat().st_mode & 0o444}
    checkpoint = open_checkpoint(str(out))
    assert checkpoint.config == start.config
    reader = checkpoint.reader()
    for name, shape in expected_tensors(start.config):
        read = torch.empty(shape)
        reader.read_into(read, name, rows=range(shape[0]))
        assert torch.equal(read, start.read(name))


def test_a_rank_that_does_not_write_consumes_all_tensors(tmp_path: Path, start: StartingModel) -> None:
    given: list[str] = []
    export = {"dtype": torch.float32, "writes": False}
    assert export_folder(tmp_path / "model", _tensors(start, given), start.config, start.tokenizer, **export) == ""
    assert len(given) == len(list(expected_tensors(start.config)))
    assert not (tmp_path / "model").exists()


def test_a_failed_export_leaves_nothing_and_consumes_all_tensors(
    tmp_path: Path, start: StartingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(held: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(held, path.parent / "missing" / path.name, metadata)  # safetensors has an error type of its own

    monkeypatch.setattr("tightwire.training.start.export.save_file", fail)
    given: list[str] = []
    export = {"dtype": torch.float32, "writes": True, "file_bytes": 1}
    error = export_folder(tmp_path / "model", _tensors(start, given), start.config, start.tokenizer, **export)
    assert "model: " in error and "No such file or directory" in error
    assert len(given) == len(list(expected_tensors(start.config)))
    assert not list(tmp_path.glob("model*"))


def test_a_folder_without_a_model_is_not_replaced(tmp_path: Path, start: StartingModel) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").touch()
    export = {"dtype": torch.float32, "writes": True}
    error = export_folder(tmp_path / "model", _tensors(start, []), start.config, start.tokenizer, **export)
    assert "exists and has no config.json, so it is no earlier export; give another export.folder" in error
    assert (tmp_path / "model" / "thesis.tex").exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_only_an_earlier_export_is_replaced(tmp_path: Path, start: StartingModel, earlier: bool) -> None:
    out, export = tmp_path / "model", {"dtype": torch.float32, "writes": True}
    if earlier:
        assert export_folder(out, _tensors(start, []), start.config, start.tokenizer, **export) == ""
    else:
        out.mkdir()
        (out / "config.json").write_text('{"port": 80}')
    (out / "app.py").write_text("precious")
    error = export_folder(out, _tensors(start, []), start.config, start.tokenizer, **export)
    assert ("exists and has no tightwire-export.json, so it is no earlier export" in error) is not earlier
    assert (out / "app.py").exists() is not earlier


def test_a_model_that_the_run_reads_is_not_replaced(tmp_path: Path, start: StartingModel) -> None:
    out, export = tmp_path / "model", {"dtype": torch.float32, "writes": True}
    assert export_folder(out, _tensors(start, []), start.config, start.tokenizer, **export) == ""
    check_out(out, "config.json", ("", "smollm2-135m", str(tmp_path)))
    (out / "base.gguf").touch()
    for read in (out, tmp_path / "link", out / "base.gguf"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(out)
        with pytest.raises(ValueError, match=r"has the model .*, which this run reads; give another export.folder"):
            check_out(out, "config.json", ("", str(read)))


def test_a_trained_tokenizer_is_saved_and_reused(tmp_path: Path) -> None:
    texts = ["the quick brown fox jumps over the lazy dog " * 3, "pack my box with five dozen liquor jugs"]
    trained = train_bpe(290, tmp_path, lambda: texts)
    found = train_bpe(290, tmp_path, lambda: pytest.fail("it is there"))
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))

    assert trained.vocab_size == found.vocab_size == 290
    ids = found.encode(texts[1])
    assert ids == trained.encode(texts[1]) and len(ids) < len(texts[1])
    assert found.decode(ids) == texts[1]
    assert found.bos_token_id == 0 and found.eos_token_ids == (1, 3)


def test_a_tokenizer_of_other_files_or_another_size_is_not_reused(tmp_path: Path) -> None:
    texts, keep_in = ["the quick brown fox jumps over the lazy dog " * 3], tmp_path / "tokenizer"
    train_bpe(280, keep_in, lambda: texts, "a")
    assert train_bpe(285, keep_in, lambda: texts, "a").vocab_size == 285
    with pytest.raises(
        ValueError, match="the checkpoints have bpe:285 of their data.files, not bpe:280 of these; restore"
    ):
        train_bpe(280, keep_in, lambda: texts, "a", resumes=True)
    with pytest.raises(ValueError, match="restore both, or give another `run`"):
        train_bpe(285, keep_in, lambda: texts, "b", resumes=True)
    assert train_bpe(285, keep_in, lambda: pytest.fail("it is there"), "a", resumes=True).vocab_size == 285
    train_bpe(285, keep_in, lambda: texts * 2, "b")
    (keep_in / "made_of.json").unlink()  # a version that did not write it
    assert train_bpe(285, keep_in, lambda: pytest.fail("it is there"), "a", resumes=True).vocab_size == 285


@pytest.mark.parametrize(
    ("size", "words"), [(100, "give bpe:260 to bpe:16777216"), (5000, r"the data gives 2\d\d tokens, not 5000")]
)
def test_an_impossible_tokenizer_size_is_refused(tmp_path: Path, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train_bpe(size, tmp_path, lambda: ["too little text"])
