"""Every form of model argument is opened, or refused with a helpful message."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers.model.broken_gguf import Parts
from helpers.model.tiny_gguf import make_tiny_gguf
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny import make_tiny, tiny_config

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import RANDOM_SHAPES, check_name, has_copy, read_sizes
from tightwire.model.open import fingerprint, open_checkpoint
from tightwire.model.text.tokenizer import BOS_ID, EOS_ID


def test_folder(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "my-llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == "my-llama"
    assert checkpoint.path == folder
    assert checkpoint.config.eos_token_ids == (257, 259)
    assert checkpoint.tokenizer().eos_token_ids == (257, 259)
    assert checkpoint.config.dtype == "float32"


def test_location_opens_the_same_model_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("m")
    monkeypatch.chdir("/")
    assert open_checkpoint(checkpoint.location).config == checkpoint.config


def test_a_missing_dtype_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", dtype="float16")
    raw = tiny_config()
    del raw["dtype"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert open_checkpoint(str(folder)).config.dtype == "float16"


def _ties(folder: Path) -> Path:
    """The folder, whose config.json now ties the head, whatever the file has."""
    (folder / "config.json").write_text(json.dumps(tiny_config(tie_word_embeddings=True)))
    return folder


def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(_ties(make_tiny(tmp_path / "m"))))
    assert not checkpoint.config.tied_embeddings
    assert checkpoint.note.startswith("used with its own head")


def test_a_head_that_differs_in_its_last_number_is_used(tmp_path: Path) -> None:
    folder = _ties(make_tiny(tmp_path / "m"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.tied_embeddings and not checkpoint.note
    weights["lm_head.weight"][-1, -1] += 1
    save_file(weights, folder / "model.safetensors")
    assert not open_checkpoint(str(folder)).config.tied_embeddings


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = _ties(make_tiny(tmp_path / "m"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \(303, 64\)"):
        open_checkpoint(str(folder))


def _with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    """The folder, whose file has these tensors too."""
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_tensors_of_its_modules_that_no_layer_uses_are_refused(name: str, tmp_path: Path) -> None:
    model = _with_tensors(make_tiny(tmp_path / "m"), {name: torch.ones(64)})
    with pytest.raises(ModelError, match=rf"m: it has 1 tensors that a Llama model .* such as {name}; supported"):
        open_checkpoint(model)


def test_tensors_without_which_answers_are_the_same_are_not_refused(tmp_path: Path) -> None:
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.0.mlp.up_proj.input_scale": torch.ones(1),
        "model.layers.1.self_attn.q_proj.bias": torch.zeros(64),  # of GPTQ
    }
    assert open_checkpoint(_with_tensors(make_tiny(tmp_path / "m"), harmless)).note == ""


def test_tensors_of_other_modules_are_named(tmp_path: Path) -> None:
    others = {"score.weight": torch.ones(1, 64), "model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)}
    note = open_checkpoint(_with_tensors(make_tiny(tmp_path / "m"), others)).note
    assert note.endswith("2 tensors of other modules, such as model.layers.2.mlp.up_proj.weight, score.weight")


@pytest.mark.parametrize(
    "names",
    [
        ["blk.1.attn_q.bias"],
        ["blk.0.attn_q_norm.weight"],
        ["blk.0.post_attention_norm.weight", "blk.0.post_ffw_norm.weight"],
        ["blk.0.attn_output.bias", "blk.1.attn_output.bias"],
        ["blk.2.attn_norm.weight"],
    ],
    ids=" ".join,
)
def test_tensors_of_a_gguf_that_no_layer_uses_are_refused(names: list[str], tmp_path: Path) -> None:
    parts = Parts.of_tiny(tmp_path / "plain.gguf")
    norm = parts.tensor("output_norm.weight")
    parts.tensors += [replace(norm, name=name) for name in names]
    (tmp_path / "m.gguf").write_bytes(parts.to_bytes())
    with pytest.raises(ModelError, match=rf"m.gguf: it has {len(names)} tensors that .* such as {', '.join(names)};"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_gguf_file_and_folder_of_one(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf")
    for model in (path, tmp_path):
        checkpoint = open_checkpoint(str(model))
        assert (checkpoint.name, checkpoint.path) == ("tiny", path)
    make_tiny_gguf(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"several \.gguf files, name one: other\.gguf, tiny\.gguf"):
        open_checkpoint(str(tmp_path))


def test_models_with_the_same_norms_have_different_fingerprints(tmp_path: Path) -> None:
    """As weights into which an adapter was merged."""
    folder = make_tiny(tmp_path / "m")
    before = fingerprint(open_checkpoint(str(folder)))
    assert fingerprint(open_checkpoint(str(folder))) == before
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.25
    save_file(weights, folder / "model.safetensors")
    assert fingerprint(open_checkpoint(str(folder))) != before


def test_known_name(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert (checkpoint.name, checkpoint.path) == ("smollm2-135m", smollm2_path)
    assert open_checkpoint(checkpoint.location).config == checkpoint.config


@pytest.mark.parametrize("shape", sorted(RANDOM_SHAPES))
def test_random_shapes(shape: str) -> None:
    checkpoint = open_checkpoint(f"random:{shape}")
    assert checkpoint.path is None
    assert checkpoint.name == checkpoint.location == f"random:{shape}"
    assert checkpoint.config.vocab_size == 128256
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids[0]) == (BOS_ID, EOS_ID)


def test_random_from_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(num_hidden_layers=5)))
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("random:config.json")
    monkeypatch.chdir("/")
    again = open_checkpoint(checkpoint.location)
    assert again.config.num_layers == 5
    tokenizer = again.tokenizer()
    assert tokenizer.vocab_size == 304
    prompt = tokenizer.encode_chat([{"role": "user", "content": "é"}])
    assert tokenizer.decode(prompt) == "user\néassistant\n"
    assert max(prompt) < 304


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("smolm2", "did you mean 'smollm2-135m'?"),
        ("", "no such model: '' is neither a file nor a folder"),
        ("/no/such/folder", "neither a file nor a folder"),
        ("missing.gguf", "neither a file nor a folder"),
        ("folder/missing.gguf", "neither a file nor a folder"),
        ("random:gpt-2", "unknown shape 'gpt-2'; choose one of llama-3.2-1b"),
    ],
)
def test_not_found(model: str, named: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(model)
    assert named in str(caught.value)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json \(no \.gguf either\)"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"give the folder that also holds config\.json"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        open_checkpoint(str(tmp_path))


class FakeHub:
    """Stands for ``snapshot_download``: copies the allowed files of one folder, and remembers what was asked."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target, self.is_online = source, target, True

    def __call__(self, repo_id: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        if not (self.is_online or self.target.is_dir()):
            raise LocalEntryNotFoundError("nothing in the cache")
        self.target.mkdir(exist_ok=True)
        for pattern in allow_patterns if self.is_online and not local_files_only else ():
            for path in self.source.glob(pattern):
                shutil.copy(path, self.target / path.name)
        return str(self.target)

    def info(self, repo_id: str, *, timeout: float) -> SimpleNamespace:
        """Stands for ``model_info``."""
        if not self.is_online:
            raise ConnectionError("Name or service not known")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in self.source.iterdir()])


@pytest.mark.parametrize("sharded", [False, True])
def test_repo_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    hub = FakeHub(make_tiny(tmp_path / "remote", sharded=sharded), tmp_path / "local")
    (hub.source / "pytorch_model.bin").write_bytes(b"not wanted")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    checkpoint = open_checkpoint("owner/tiny-llama")
    assert (checkpoint.name, checkpoint.path) == ("owner/tiny-llama", hub.target)
    assert checkpoint.tokenizer().chat_template is not None
    assert not (hub.target / "pytorch_model.bin").exists()


def test_an_unsupported_repo_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(make_tiny(tmp_path / "remote"), tmp_path / "local")
    (hub.source / "config.json").write_text(json.dumps(tiny_config(architectures=["OtherForCausalLM"])))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    with pytest.raises(ModelError, match="OtherForCausalLM is not supported"):
        open_checkpoint("owner/other")
    assert not list(hub.target.glob("*.safetensors"))


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = (
        f"'owner/tiny' is no folder here, and the repo of that name was not fetched: the Hugging Face Hub ({huggingface_hub.constants.ENDPOINT}) "
        "was not reached and its cache has no such repo; give a folder with config.json and safetensors, a .gguf file, or a "
        "name: smollm2-135m"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        open_checkpoint("owner/tiny")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A repo of GGUF files in two quantizations, one of them split, and a vision projector."""
    hub = FakeHub(tmp_path / "remote", tmp_path / "local")
    hub.source.mkdir()
    make_tiny_gguf(hub.source / "Tiny-Q8_0.gguf", "Q8_0", part_tensors=9)
    make_tiny_gguf(hub.source / "tiny.q4_1.gguf", "Q4_1")
    make_tiny_gguf(hub.source / "Tiny-UD-Q4_1.gguf", "Q4_1")
    (hub.source / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (hub.source / "README.md").write_bytes(b"not wanted")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub, "model_info", hub.info)
    return hub


@pytest.mark.parametrize(
    ("quantization", "files"),
    [
        ("Q8_0", [f"Tiny-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]),
        ("Q4_1", ["tiny.q4_1.gguf"]),
        ("ud-q4_1", ["Tiny-UD-Q4_1.gguf"]),
    ],
)
def test_a_gguf_by_repo_id_and_quantization(hub: FakeHub, quantization: str, files: list[str]) -> None:
    model = f"owner/tiny:{quantization}"
    check_name(model)
    assert has_copy(model) and read_sizes(model) is None
    checkpoint = open_checkpoint(model)
    assert (checkpoint.name, checkpoint.path) == (model, hub.target / files[0])
    assert sorted(path.name for path in hub.target.iterdir()) == files
    hub.is_online = False
    assert open_checkpoint(model).config == checkpoint.config


def test_what_a_repo_of_ggufs_has_is_listed(hub: FakeHub) -> None:
    forms = "owner/tiny:Q8_0, owner/tiny:UD-Q4_1, owner/tiny:q4_1"
    with pytest.raises(
        ModelError,
        match=f"^owner/tiny has no .gguf file in Q4_K_M; download one and give its path, or name one as {forms}$",
    ):
        open_checkpoint("owner/tiny:Q4_K_M")
    with pytest.raises(ModelError, match=f"^owner/tiny has no safetensors but GGUF files; name one as {forms}$"):
        open_checkpoint("owner/tiny")
    make_tiny_gguf(hub.source / "other-Q8_0.gguf", "Q8_0")
    with pytest.raises(
        ModelError, match=r"several .gguf files in Q8_0: Tiny-Q8_0-00001-of-00003.gguf, other-Q8_0.gguf"
    ):
        open_checkpoint("owner/tiny:Q8_0")
    hub.is_online = False
    with pytest.raises(ModelError, match="'owner/tiny' is no folder here.*was not reached"):
        open_checkpoint("owner/tiny:Q8_0")


def test_a_repo_without_ggufs_has_no_quantization(hub: FakeHub) -> None:
    for path in hub.source.glob("*iny*"):
        path.unlink()
    with pytest.raises(ModelError, match="owner/tiny has no .gguf file, so no Q4_K_M; leave out :Q4_K_M"):
        open_checkpoint("owner/tiny:Q4_K_M")


def test_transformers_is_not_needed(tmp_path: Path) -> None:
    """Importing it costs every process seconds and 200 MB."""
    folder = make_tiny(tmp_path / "m")
    code = (
        "import sys; from tightwire.model.open import open_checkpoint; "
        f"t = open_checkpoint({str(folder)!r}).tokenizer(); t.encode_chat([{{'role': 'user', 'content': 'x'}}]); "
        "assert not {'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
