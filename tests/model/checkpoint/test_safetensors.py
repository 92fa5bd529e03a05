"""Safetensors slices, and each way a folder of them can be damaged."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import make_tiny, tiny_config, tiny_tensors

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.safetensors import SafetensorsReader
from tightwire.model.open import open_checkpoint

SHARD = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reads_back_what_was_written(tmp_path: Path, sharded: bool, dtype: str) -> None:
    reader = SafetensorsReader(make_tiny(tmp_path / "m", sharded=sharded, dtype=dtype))
    want = tiny_tensors(tiny_config())
    for name, tensor in want.items():
        out = torch.empty(tensor.shape)
        reader.read_into(out, name, rows=range(len(out)))
        assert torch.equal(out, tensor.to(getattr(torch, dtype)).float()), name
        assert reader.dtype_name(name) == dtype


def test_slices(tmp_path: Path) -> None:
    reader = SafetensorsReader(make_tiny(tmp_path / "m"))
    name = "model.layers.0.mlp.down_proj.weight"
    want = tiny_tensors(tiny_config())[name]
    for rows, columns in ((range(64), range(16, 96)), (range(10, 11), range(1)), (range(5, 40), None)):
        out = torch.empty((len(rows), 160 if columns is None else len(columns)), dtype=torch.float16)
        reader.read_into(out, name, rows=rows, columns=columns)
        part = want[rows.start : rows.stop]
        assert torch.equal(out, (part if columns is None else part[:, columns.start : columns.stop]).half())


@pytest.mark.parametrize("shape", [(8, 160), (9, 64), (6,)])
def test_a_target_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    reader = SafetensorsReader(make_tiny(tmp_path / "m"))
    with pytest.raises(RuntimeError, match="size"):
        reader.read_into(torch.empty(shape), "lm_head.weight", rows=range(10))


def test_pieces_join_seamlessly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces far smaller than a matrix, all of them arrive in place."""
    monkeypatch.setattr("tightwire.model.checkpoint.reader.CHUNK_BYTES", 1000)
    reader = SafetensorsReader(make_tiny(tmp_path / "m"))
    want = tiny_tensors(tiny_config())["lm_head.weight"]
    out = torch.empty(want.shape, dtype=torch.float64)  # not as in the file: what is, is not cut into pieces
    reader.read_into(out, "lm_head.weight", rows=range(len(out)))
    assert torch.equal(out, want.double())


def opening(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(folder))
    return str(caught.value)


def test_missing_shard(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", sharded=True)
    (folder / SHARD).unlink()
    assert f"1 of 3 shards are missing: {SHARD}" in opening(folder)


def test_a_single_file_is_read_before_an_index_of_older_ones(tmp_path: Path) -> None:
    """As transformers does; the files of the index may be gone."""
    folder = make_tiny(tmp_path / "m", sharded=True)
    newer = make_tiny(tmp_path / "newer", seed=1)
    (newer / "model.safetensors").rename(folder / "model.safetensors")
    (folder / SHARD).unlink()
    name = "model.layers.0.mlp.down_proj.weight"
    out = torch.empty(64, 160)
    SafetensorsReader(folder).read_into(out, name, rows=range(64))
    assert torch.equal(out, tiny_tensors(tiny_config(), seed=1)[name])


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    folder = make_tiny(tmp_path / "m", sharded=True)
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    message = opening(folder)
    assert SHARD in message
    assert "truncated" in message


def test_missing_tensor(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    tensors = tiny_tensors(tiny_config())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight is missing" in opening(folder)


def test_wrong_shape(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_config(intermediate_size=128)))
    message = opening(folder)
    assert "model.layers.0.mlp.gate_proj.weight has shape (160, 64)" in message
    assert "(128, 64)" in message


def test_numbers_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    tensors = tiny_tensors(tiny_config())
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight is F8_E4M3; supported: F32, F16, BF16" in opening(folder)


def test_pickled_weights_only(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin, which must be converted to safetensors" in opening(folder)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git lfs pull" in opening(folder)


def test_damaged_header_and_index(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", sharded=True)
    (folder / SHARD).write_bytes((8).to_bytes(8, "little") + b"{broken}" + bytes(100))
    assert "header is damaged" in opening(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "is not a JSON object" in opening(folder)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = make_tiny(tmp_path_factory.mktemp("fuzz") / "m")
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=200)
@given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_read_or_refused_in_words(intact: tuple[Path, bytes], place: float, value: bytes) -> None:
    folder, data = intact
    at = int(place * (8 + int.from_bytes(data[:8], "little")))
    (folder / "model.safetensors").write_bytes(data[:at] + value + data[at + len(value) :])
    try:
        open_checkpoint(str(folder))
    except ModelError as error:
        assert "model.safetensors" in str(error) or "tensor" in str(error)
