"""Opens a model by known name, folder, .gguf, repo id or random weights; reads only headers."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tightwire.model.checkpoint.catalog import CATALOG, Progress, pull
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.gguf import GgufFile, GgufReader
from tightwire.model.checkpoint.gguf_config import config_from_gguf
from tightwire.model.checkpoint.gguf_header import plain_stem
from tightwire.model.checkpoint.header import RANDOM, RANDOM_SHAPES, check_name, only_gguf, random_config, read_json
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.hub import fetch_folder, fetch_gguf
from tightwire.model.checkpoint.quantization import parse_quantization
from tightwire.model.checkpoint.quantized import QuantizedReader
from tightwire.model.checkpoint.random import RandomReader
from tightwire.model.checkpoint.reader import CheckpointReader, row_chunks
from tightwire.model.checkpoint.safetensors import SafetensorsReader
from tightwire.model.checkpoint.tensors import EMBEDDING, HEAD, PartsReader, check_tensors, expected_tensors, unused_of
from tightwire.model.text.gguf_tokenizer import tokenizer_from_gguf
from tightwire.model.text.tokenizer import SPECIAL_IDS, Tokenizer, byte_backend, tokenizer_from_folder, with_template
from tightwire.model.weights.formats import WeightFormats, choose_formats
from tightwire.model.weights.prepared.folder import Prepared, open_prepared
from tightwire.model.weights.prepared.manifest import MANIFEST
from tightwire.whole_folder import is_partial


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A supported model of which only headers have been read."""

    name: str
    location: str  # the argument for ``open_checkpoint`` in another process; it needs no network
    config: LlamaConfig
    reader: Callable[[], CheckpointReader]
    tokenizer: Callable[[], Tokenizer]
    note: str = ""  # how weights that another project quantized are kept, and whether the file has a head of its own
    generation: Mapping[str, Any] = field(default_factory=dict)  # the content of generation_config.json
    prepared: Prepared | None = None  # a folder made by ``tightwire prepare``; ``reader`` raises ModelError for one

    @property
    def path(self) -> Path | None:
        """The folder or file; None for random weights."""
        return None if self.location.startswith(RANDOM) else Path(self.location)


def open_checkpoint(model: str, seed: int = 0, *, progress: Progress = lambda fraction: None) -> Checkpoint:
    """Find the model and check its headers; raises ModelError if it is not found, damaged or not supported.

    ``model``: ``smollm2-135m``, a folder with config.json and safetensors, a prepared folder, a .gguf file (or a folder with one),
    each also in parts, a Hugging Face repo id (``owner/name``, for a GGUF ``owner/name:Q4_K_M``), or ``random:SHAPE`` with a known
    shape or the path of a config.json. ``seed``: of random weights. ``progress``: called with a known model's downloaded share.
    """
    check_name(model)
    if model in CATALOG:
        return replace(_open_gguf(pull(model, progress=progress)), name=model)
    if model.startswith(RANDOM):
        return _open_random(model, seed)
    path = Path(os.path.expanduser(model))
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        raise ModelError(f"{path}: is not a .gguf file; for safetensors give the folder that also holds config.json")
    if path.is_dir():
        return _open_folder(path)
    repo_id, _, quantization = model.partition(":")
    if quantization:
        return replace(_open_gguf(fetch_gguf(repo_id, quantization)), name=model)
    return replace(_open_folder(fetch_folder(repo_id, _folder_config)), name=model)


def fingerprint(checkpoint: Checkpoint) -> str:
    """A digest of the configuration, the stored types, the norms and a row of most matrices: unlike models differ.

    Weights into which an adapter was merged have the same norms. Cost: reads some ten thousand numbers a layer.
    """
    digest = hashlib.sha256(repr(checkpoint.config).encode())
    if checkpoint.prepared is not None:
        digest.update(repr(checkpoint.prepared.manifest).encode())
        return digest.hexdigest()[:16]
    reader = checkpoint.reader()
    for name, shape in expected_tensors(checkpoint.config):
        digest.update(reader.stored_as(name).encode())
        if ".q_proj." in name or ".k_proj." in name:
            continue  # a GGUF file interleaves their rows, so that a row costs a head
        rows = range(shape[0] if len(shape) == 1 else 1)
        numbers = torch.empty(len(rows), *shape[1:])
        reader.read_into(numbers, name, rows=rows)
        digest.update(numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


def formats_of(checkpoint: Checkpoint, quantization: str) -> WeightFormats:
    """Return the formats of a prepared folder's matrices, or those of ``choose_formats``."""
    if checkpoint.prepared is not None:
        return checkpoint.prepared.formats
    with naming(checkpoint.location):  # it may be that of a model that drafts
        return choose_formats(checkpoint.reader(), checkpoint.config, quantization)


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    with naming(file.path):
        config = config_from_gguf(file)
        reader = PartsReader(GgufReader(file, config), config)
        check_tensors(reader, config)
        unused_of(file.tensors, config)
    return Checkpoint(
        name=plain_stem(file.path),
        location=str(file.path.absolute()),
        config=config,
        reader=lambda: reader,
        tokenizer=lambda: tokenizer_from_gguf(file, config),
    )


def _open_folder(folder: Path) -> Checkpoint:
    if is_partial(folder) or (not (folder / MANIFEST).is_file() and any(folder.glob("rank-*-of-*.weights"))):
        raise ModelError(f"{folder}: was not finished by `tightwire prepare`; run that again, and remove this folder")
    if (folder / MANIFEST).is_file():
        return _open_prepared(folder)
    if (gguf := only_gguf(folder)) is not None:
        return replace(_open_gguf(gguf), generation=_generation(folder))
    config = _folder_config(folder)
    plain = SafetensorsReader(folder)
    stated = read_json(folder / "config.json")
    with naming(folder, "a quantized tensor has an unexpected shape", IndexError, ValueError):
        quantization = parse_quantization(stated)
        quantized = None if quantization is None else QuantizedReader(plain, quantization)
        reader = PartsReader(quantized or plain, config)
        notes = [f"quantized as {quantized.describe()}"] if quantized else []
        stores_head = bool({HEAD, "lm_head.qweight", "lm_head.weight_packed"} & plain.names())
        as_stored = replace(config, tied_embeddings=config.tied_embeddings and not stores_head)
        check_tensors(reader, as_stored)
        if unused := unused_of(plain.names(), as_stored, plain.whole):
            notes.append(f"used without {len(unused)} tensors of other modules, such as {', '.join(unused[:3])}")
        if config.tied_embeddings and stores_head and _has_own_head(reader, plain, config):
            config = replace(config, tied_embeddings=False)
            notes.append("used with its own head, which differs from the embedding, although config.json ties them")
    if not (stated.get("dtype") or stated.get("torch_dtype")):
        config = replace(config, dtype=plain.dtype_name(EMBEDDING))
    return _in_folder(folder, config, folder.absolute().name, lambda: reader, note="; ".join(notes))


def _has_own_head(reader: CheckpointReader, plain: SafetensorsReader, config: LlamaConfig) -> bool:
    """Return True if head and embedding differ: transformers ties equal ones only. Cost: reads equal ones whole."""
    stored = {plain.dtype_name(name) if name in plain.names() else "float32" for name in (HEAD, EMBEDDING)}
    dtype = torch.float32 if len(stored) > 1 else getattr(torch, stored.pop())  # equal types need no conversion
    for rows in row_chunks(range(config.vocab_size), 4 * config.hidden_size):
        head, embedding = torch.empty(2, len(rows), config.hidden_size, dtype=dtype)
        reader.read_into(head, HEAD, rows=rows)
        reader.read_into(embedding, EMBEDDING, rows=rows)
        if not torch.equal(head, embedding):
            return True
    return False


def _in_folder(
    folder: Path, config: LlamaConfig, name: str, reader: Callable[[], CheckpointReader], **others: Any
) -> Checkpoint:
    return Checkpoint(
        name=name,
        location=str(folder.absolute()),
        config=config,
        reader=reader,
        tokenizer=lambda: tokenizer_from_folder(folder, config.bos_token_id, config.eos_token_ids),
        generation=_generation(folder),
        **others,
    )


def _open_prepared(folder: Path) -> Checkpoint:
    prepared = open_prepared(folder, _folder_config(folder))

    def no_reader() -> CheckpointReader:
        raise ModelError(
            f"{folder}: is a prepared folder, split over {prepared.tp} ranks; `tightwire serve {folder} --tp {prepared.tp}` serves it, and "
            f"everything else needs the original model ({prepared.manifest.model})"
        )

    return _in_folder(folder, prepared.config, prepared.manifest.model, no_reader, prepared=prepared)


def _folder_config(folder: Path) -> LlamaConfig:
    with naming(folder):
        return config_from_hf(read_json(folder / "config.json"), _generation(folder))


def _generation(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _open_random(model: str, seed: int) -> Checkpoint:
    """Open random weights of a known shape, with a byte tokenizer whose special tokens replace the configuration's."""
    shape = model.removeprefix(RANDOM)
    location = model if shape in RANDOM_SHAPES else RANDOM + str(Path(os.path.expanduser(shape)).absolute())
    config = replace(random_config(shape), **SPECIAL_IDS)
    return Checkpoint(
        name=model,
        location=location,
        config=config,
        reader=lambda: RandomReader(config, seed),
        tokenizer=lambda: with_template(byte_backend(config.vocab_size)),
    )
