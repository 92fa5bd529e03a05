"""Exports the trained model and its tokenizer as a Hugging Face folder, or an adapter as PEFT's; `tightwire serve` opens both.

Every rank takes part in gathering; rank 0 writes, and holds at most one file's tensors.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tightwire import __version__
from tightwire.model.adapters.peft import CONFIG_FILE as ADAPTER_CONFIG
from tightwire.model.adapters.peft import PREFIX, WEIGHTS_FILE
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.text.tokenizer import Tokenizer
from tightwire.training.config.learning import LoraConfig
from tightwire.training.start.lora import adapter_json, base_of
from tightwire.training.start.model import HEAD_NAME
from tightwire.whole_folder import check_place, whole_folder

_FILE_BYTES = 4_000_000_000
CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
CRITIC = "critic"  # PPO's second adapter, in the run's folder
_MARK = "tightwire-export.json"  # in every export, and in no folder that something else made
SCORE_NAME = "score.weight"  # of a reward model's head, as transformers' models for sequence classification name it


def export_folder(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: LlamaConfig,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    writes: bool,
    file_bytes: int = _FILE_BYTES,
) -> str:
    """Write the folder ``out``, replacing an earlier export only when the new one is complete. Returns the error or "".

    ``tensors``: collective; consumed to the end even if the disk fails, so that no other rank waits.
    """
    write = partial(_write, config=config, tokenizer=tokenizer, dtype=dtype, file_bytes=file_bytes)
    return _export(out, tensors, write, CONFIG, writes)


def export_adapter(
    out: Path, tensors: Iterable[tuple[str, Tensor]], config: LoraConfig, base: str, *, dtype: torch.dtype, writes: bool
) -> str:
    """Write a PEFT folder of the adapter's matrices as ``export_folder`` does. ``base``: the name of its base model."""

    def write(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        names = {HEAD_NAME: SCORE_NAME}
        held = {f"{PREFIX}{names.get(name, name)}": full.detach().to("cpu", dtype, copy=True) for name, full in tensors}
        targets = sorted({name.split(".")[-3] for name in held if base_of(name)})  # ....q_proj.lora_A.weight
        saved = ["score"] if f"{PREFIX}{SCORE_NAME}" in held else []
        settings = json.dumps(adapter_json(config, base, targets, saved), indent=1) + "\n"
        (folder / ADAPTER_CONFIG).write_text(settings)
        save_file(held, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).chmod((folder / ADAPTER_CONFIG).stat().st_mode)

    return _export(out, tensors, write, ADAPTER_CONFIG, writes)


def check_out(out: Path, marker: str, read: Iterable[str]) -> None:
    """Raises OSError or ValueError: the export cannot be written to ``out``, or would replace something that is no export with ``marker``, or that the run reads (``read``: models)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for model in read:
        path = Path(os.path.expanduser(model)).resolve()
        if model and path.exists() and out.resolve() in (path, *path.parents):
            raise ValueError(f"{out} has the model {model}, which this run reads; give another export.folder")
    check_place(out.resolve(), partial(_check_replaced, marker))


def _export(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    write: Callable[[Path, Iterable[tuple[str, Tensor]]], None],
    marker: str,
    writes: bool,
) -> str:
    remaining = iter(tensors)
    error = ""
    if writes:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(out, check_replaced=partial(_check_replaced, marker)) as folder:
                write(folder, remaining)
                (folder / _MARK).write_text(json.dumps({"tightwire": __version__, "has": marker}) + "\n")
        except (OSError, ValueError, SafetensorError) as failure:
            error = f"{out}: {failure}"
    for _ in remaining:
        pass
    return error


def _write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: LlamaConfig,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    config_json = {**config_to_hf(config), "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(config_json, indent=1) + "\n")
    tokenizer.save(folder)
    files, total = [], 0
    for number, held in enumerate(_batches(tensors, dtype, file_bytes)):
        save_file(held, folder / f"part-{number}", metadata={"format": "pt"})
        files.append(list(held))
        total += sum(tensor.nbytes for tensor in held.values())
    weight_map = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        # safetensors makes files that only their owner can read, but a server may run as another user.
        (folder / f"part-{number}").chmod((folder / CONFIG).stat().st_mode)
        (folder / f"part-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _batches(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copies in ``dtype``, in batches of ``file_bytes`` or a little more."""
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if sum(kept.nbytes for kept in held.values()) >= file_bytes:
            yield held
            held = {}
    if held:
        yield held


def _check_replaced(marker: str, out: Path) -> None:
    if missing := [name for name in (marker, _MARK) if not (out / name).is_file()]:
        text = f"{out} exists and has no {missing[0]}, so it is no earlier export"
        raise ValueError(f"{text}; give another export.folder, or move that folder away")
