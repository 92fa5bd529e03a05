"""Exports the trained model and its tokenizer as a Hugging Face folder, which `tightwire serve` opens.

Every rank takes part in gathering; rank 0 writes, and holds at most one file's tensors.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig, config_to_hf
from tightwire.model.checkpoint.whole_folder import check_place, whole_folder
from tightwire.model.text.tokenizer import Tokenizer

_FILE_BYTES = 4_000_000_000
_INDEX = "model.safetensors.index.json"


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
    """Write the folder ``out``, replacing an earlier export only when the new one is complete.

    Args:
        tensors: collective; consumed to the end even if the disk fails, so that no other rank waits.
        writes: whether this rank writes.
    Returns:
        The error ("" for none), for the caller to share with the other ranks.
    """
    remaining = iter(tensors)
    error = ""
    if writes:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(out, check_replaced=_check_replaced) as folder:
                _write(folder, remaining, config, tokenizer, dtype, file_bytes)
        except (OSError, ValueError) as failure:
            error = f"{out}: {failure}"
    for _ in remaining:
        pass
    return error


def check_out(out: Path) -> None:
    """Raises OSError or ValueError: the export cannot be written to ``out``, or would replace something that is
    not a model.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    check_place(out.resolve(), _check_replaced)


def _write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: LlamaConfig,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        if held:
            save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
            files.append(list(held))
            held.clear()

    for name, tensor in tensors:
        held[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        total += held[name].nbytes
        if sum(kept.nbytes for kept in held.values()) >= file_bytes:
            flush()
    flush()
    _name_files(folder, files, total)
    dtype_name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(
        json.dumps({**config_to_hf(config), "torch_dtype": dtype_name}, indent=1) + "\n"
    )
    tokenizer.save(folder)
    for (
        path
    ) in folder.iterdir():  # safetensors files are readable by their owner only, but a server may run as another user
        path.chmod((folder / "config.json").stat().st_mode)


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Rename the parts to a single file, or to numbered files with an index."""
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _check_replaced(out: Path) -> None:
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} exists and is not a model; give another export.folder")
