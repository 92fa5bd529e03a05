"""An incomplete or damaged prepared folder is refused, and the damage is located."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from tightwire.buffers import page_aligned
from tightwire.large_file import reads_direct
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, prepare, read_back
from tightwire.model.weights.prepared.manifest import MANIFEST

CPU = torch.device("cpu")


def ignore(num_bytes: int) -> None: ...


@pytest.fixture
def out(tmp_path: Path) -> Path:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "m")))
    prepare(checkpoint, tmp_path / "out", PrepareOptions(tp=2, dtype="float32"))
    return tmp_path / "out"


def flip_a_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def test_a_damaged_blob_is_found_by_its_checksum_at_first_use(out: Path) -> None:
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    blob = prepared.manifest.ranks[1].layers[1]
    path = out / "rank-1-of-2.weights"
    flip_a_bit(path, blob.offset + 100)
    assert open_checkpoint(str(out)).prepared == prepared
    (damage,) = read_back(out, prepared.manifest, lambda stage, fraction: None)
    assert "rank-1-of-2.weights: layer 1 is damaged" in damage
    buffer = page_aligned(prepared.packed(1).stored[1].num_bytes, CPU)
    store = prepared.store(1)
    for read in (lambda: store.read(1, buffer, ignore), lambda: store.read_plain(1, CPU, ignore)):
        with pytest.raises(
            WeightsError, match=r"rank-1-of-2\.weights: layer 1 is damaged: .* make it again with"
        ) as again:
            read()
    assert "`tightwire prepare`" in str(again.value)
    store.read(0, buffer, ignore)
    flip_a_bit(path, blob.offset + 100)
    store.read(1, buffer, ignore)
    flip_a_bit(path, blob.offset + 100)
    store.read(1, buffer, ignore)  # only the first read that succeeds is checked, which keeps streaming fast
    flip_a_bit(path, 100)
    with pytest.raises(WeightsError, match="embedding, norm and head is damaged"):
        store.read_outer(CPU, ignore)


def test_every_damage_is_listed(out: Path) -> None:
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    (out / "tokenizer.json").write_text("{}")
    (out / "config.json").unlink()
    (out / "rank-0-of-2.weights").write_bytes(bytes(prepared.manifest.ranks[0].num_bytes))
    (out / "rank-1-of-2.weights").unlink()
    damage = read_back(out, prepared.manifest, lambda stage, fraction: None)
    found = [
        next(word for word in ("config", "tokenizer", "rank-0", "rank-1") if f"/{word}" in line) for line in damage
    ]
    assert found == ["config", "tokenizer", "rank-0", "rank-0", "rank-0", "rank-1"]


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_store_says_which_file_it_reads_and_how(out: Path, io: str) -> None:
    path = out / "rank-0-of-2.weights"
    if io == "direct" and not reads_direct(path):
        pytest.skip(f"the file system of {path} reads nothing around the page cache")
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    store = prepared.store(0, io, patience_s=0.0)
    assert store.name == f"{path} ({'around' if io == 'direct' else 'through'} the page cache)"
    store.close()
    store.close()


def test_an_error_of_the_disk_is_one_of_weights_with_advice(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = open_checkpoint(str(out)).prepared
    assert prepared is not None
    store = prepared.store(0, patience_s=0.0)

    def fail(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(
            WeightsError, match="Input/output error .*; check the folder with `tightwire prepare --check`"
        ):
            store.read_outer(CPU, ignore)
    os.truncate(out / "rank-0-of-2.weights", 1)
    with pytest.raises(WeightsError, match="ends inside embedding, norm and head: .*; copy the folder again"):
        store.read_outer(CPU, ignore)


def change_manifest(out: Path, old: str, new: str, *, believable: bool = False) -> None:
    """``believable``: with the checksum put right."""
    path = out / MANIFEST
    text = path.read_text()
    assert old in text
    text = text.replace(old, new, 1)
    if believable:
        body = text[text.index('"prepared":') + len('"prepared":') : -2]
        text = f'{{"schema":"tightwire.prepared/1","sha256":"{hashlib.sha256(body.encode()).hexdigest()}","prepared":{body}}}\n'
    path.write_text(text)


@pytest.mark.parametrize(
    ("old", "new", "believable", "message"),
    [
        ("tightwire.prepared/1", "tightwire.prepared/2", False, "has schema 'tightwire.prepared/2', and this version"),
        ('"dtype": "float32"', '"dtype": "bfloat16"', False, "is damaged: its checksum differs"),
        ('"dtype": "float32"', '"dtype": "bfloat16"', True, "does not match config.json and this version"),
        ('"dtype": "float32"', '"dtype": "int3"', True, "lacks fields .* Invalid enum value 'int3'"),
        ('"codec": "none"', '"codec": "zip"', True, "does not match config.json .* unknown codec 'zip'"),
        ('"plain"', '"planes"', True, "lacks fields .* Object contains unknown field `planes`"),
        ('"query_heads": [\n     0', '"query_heads": [\n     1', True, "rank 0's shard differs"),
        ('"prepared":{', '"prepared":', False, "is damaged, or no manifest"),
    ],
)
def test_a_wrong_manifest_is_refused(out: Path, old: str, new: str, believable: bool, message: str) -> None:
    change_manifest(out, old, new, believable=believable)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(str(out))
    assert "`tightwire prepare`" in str(caught.value)


def test_an_incomplete_folder_is_not_opened(out: Path) -> None:
    path = out / "rank-1-of-2.weights"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ModelError, match=rf"rank-1-of-2\.weights: is {size - 1} bytes long, and {size} were written"):
        open_checkpoint(str(out))
    path.unlink()
    with pytest.raises(ModelError, match=r"rank-1-of-2\.weights: cannot be read: No such file"):
        open_checkpoint(str(out))
    (out / MANIFEST).unlink()
    with pytest.raises(ModelError, match="was not finished by `tightwire prepare`"):
        open_checkpoint(str(out))


def test_a_left_over_folder_is_not_opened(out: Path) -> None:
    left = out.rename(out.with_name("out.partial-123"))
    with pytest.raises(ModelError, match="was not finished by `tightwire prepare`"):
        open_checkpoint(str(left))


def test_a_changed_configuration_is_refused(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="does not match config.json"):
        open_checkpoint(str(out))
    # Another model of the same sizes: its weights would be computed with this one's rotation, or read as other words.
    (out / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    with pytest.raises(ModelError, match="config.json is not the one that was written; make the folder again"):
        open_checkpoint(str(out))


def test_another_tokenizer_is_refused_and_another_chat_template_is_not(out: Path) -> None:
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages }}"}))
    assert open_checkpoint(str(out)).tokenizer().chat_template == "{{ messages }}"
    path = out / "tokenizer.json"
    path.write_text(path.read_text().replace("w303", "w999"))
    with pytest.raises(ModelError, match="tokenizer.json is not the one that was written; make the folder again"):
        open_checkpoint(str(out))
