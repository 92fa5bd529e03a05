"""Checks a model's name and reads its sizes from config.json or a GGUF header, without torch: wrong ones are refused at once."""

import difflib
import json
import os
import re
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from tightwire.model.checkpoint.catalog import CATALOG, cached_path, is_cached
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.gguf_header import GgufHeader, split_parts
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.whole_folder import is_partial

RANDOM = "random:"
_REPO_ID = re.compile(r"(\w[\w.-]{,95}/[\w.-]{1,96})(?::([\w.-]+))?")
_LLAMA3 = {"num_kv_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0, "norm_eps": 1e-5}
_SHORT = {"head_dim": 128, "max_positions": 8192, **_LLAMA3}
_ROPE = RopeScaling(kind="llama3", factor=32.0)
_LONG = {"max_positions": 131072, "tied_embeddings": True, "rope_scaling": _ROPE, **_LLAMA3}
# The shapes of the released models.
RANDOM_SHAPES = {
    "llama-3.2-1b": LlamaConfig(num_layers=16, hidden_size=2048, num_heads=32, head_dim=64, mlp_size=8192, **_LONG),
    "llama-3.2-3b": LlamaConfig(num_layers=28, hidden_size=3072, num_heads=24, head_dim=128, mlp_size=8192, **_LONG),
    "llama-3-8b": LlamaConfig(num_layers=32, hidden_size=4096, num_heads=32, mlp_size=14336, **_SHORT),
    "llama-3-70b": LlamaConfig(num_layers=80, hidden_size=8192, num_heads=64, mlp_size=28672, **_SHORT),
}


class Sizes(NamedTuple):
    """The numbers with which options are compared before the model is opened."""

    num_heads: int
    num_layers: int
    hidden_size: int
    max_positions: int


def check_name(model: str) -> None:
    """Raise ModelError unless this can be a known name, file, folder, repo id or ``random:SHAPE``. Imports no torch."""
    if model != "" and (model in CATALOG or has_copy(model)):
        return
    close = difflib.get_close_matches(model.lower(), CATALOG, n=1)
    meant = f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(sorted(CATALOG))};"
    raise ModelError(
        f"no such model: {model!r} is neither a file nor a folder; {meant} a Hugging Face repo id looks like owner/name, "
        f"or owner/name:Q4_K_M for a GGUF; random weights: {RANDOM}SHAPE, such as {RANDOM}llama-3.2-1b"
    )


def has_copy(model: str) -> bool:
    """False for a known name that is not in the cache, and for a file or folder that is not there."""
    if model in CATALOG:
        return is_cached(model)
    is_repo_id = _REPO_ID.fullmatch(model) is not None and not model.endswith(".gguf")
    path = Path(os.path.expanduser(model))
    return is_repo_id or model.startswith(RANDOM) or os.path.isfile(path) or os.path.isdir(path)


def read_sizes(model: str) -> Sizes | None:
    """The sizes of a model on this machine; None: it must be fetched first, or its header is not a usual one.

    Raises ModelError: an unknown shape, a folder without a model, or a config.json that is damaged or not supported.
    """
    if model in CATALOG:
        return _gguf_sizes(cached_path(model)) if is_cached(model) else None
    if model.startswith(RANDOM):
        config = random_config(model.removeprefix(RANDOM))
        return Sizes(config.num_heads, config.num_layers, config.hidden_size, config.max_positions)
    path = Path(os.path.expanduser(model))
    if is_partial(path) or (path.is_dir() and any(path.glob("rank-*-of-*.weights"))):
        return None  # a folder of `tightwire prepare`; opening it says whether it is whole
    if path.is_dir():
        path = only_gguf(path) or path / "config.json"
    if path.suffix == ".gguf":
        return _gguf_sizes(path)
    if path.name != "config.json" or not path.is_file():
        return None
    with naming(path.parent):
        config = config_from_hf(read_json(path))
    return Sizes(config.num_heads, config.num_layers, config.hidden_size, config.max_positions)


def random_config(shape: str) -> LlamaConfig:
    """A known shape, or that of a config.json. Raises ModelError for others."""
    if shape in RANDOM_SHAPES:
        return RANDOM_SHAPES[shape]
    if (path := Path(os.path.expanduser(shape))).is_file():
        return config_from_hf(read_json(path))
    raise ModelError(f"unknown shape {shape!r}; choose one of {', '.join(RANDOM_SHAPES)}, or the path of a config.json")


def only_gguf(folder: Path) -> Path | None:
    """The .gguf file of a folder without config.json, or its first part; None for a folder with one. Raises ModelError: not exactly one."""
    if (folder / "config.json").is_file():
        return None
    ggufs = sorted(folder.glob("*.gguf"))
    if len(firsts := {split_parts(path)[0] for path in ggufs}) == 1:
        return firsts.pop()
    names = ", ".join(path.name for path in ggufs[:5])
    found = f"several .gguf files, name one: {names}" if ggufs else "no .gguf either"
    raise ModelError(
        f"{folder}: has no config.json ({found}); give a folder with config.json and safetensors, a .gguf file, or a name: "
        f"{', '.join(sorted(CATALOG))}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raises a ModelError that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def _gguf_sizes(path: Path) -> Sizes | None:
    names = (".attention.head_count", ".block_count", ".embedding_length", ".context_length")
    try:
        with split_parts(path)[0].open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            scalars = GgufHeader.scalars(data, names)
        return Sizes(*(int(scalars[name]) for name in names))
    except (OSError, KeyError, ValueError, TypeError):
        return None  # opening the file reads all of its header, and says what is wrong with it
