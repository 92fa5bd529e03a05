"""Creates a prepared folder from any checkpoint: split over ranks, packed and encoded once.

It processes all ranks of one layer before the next layer, so the source is read about once and in order. The files are
read back from the disk and verified before the folder gets its manifest and its final name.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tightwire.buffers import page_aligned
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.protocols import Moved
from tightwire.large_file import LargeFileWriter
from tightwire.model.checkpoint.errors import ModelError, PrepareError
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Layout
from tightwire.model.open import Checkpoint
from tightwire.model.weights.formats import WeightFormats, choose_formats, split_model
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.packed_layer import PackedModel, pack_model
from tightwire.model.weights.prepared.folder import find_damage
from tightwire.model.weights.prepared.manifest import MANIFEST, Manifest, RankFile, cuts_of, file_name, write_manifest
from tightwire.model.weights.residency import check_codec
from tightwire.sizes import disk_shortage
from tightwire.whole_folder import whole_folder

_CPU = torch.device("cpu")
_GENERATION = "generation_config.json"
_ALMOST = 0.999
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_SMALLER = "use fewer bits (--quantization, --weight-codec), or another disk"

Progress = Callable[[str, float], None]  # a stage's name, and the share of it that is done, 0 to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Split and formats of the prepared model."""

    tp: int = 1
    shares: tuple[float, ...] | None = None
    dtype: str = "bfloat16"  # of plain numbers
    quantization: str = "auto"  # see ``choose_formats``
    codec: str = "none"  # of the layers' plain matrices


@dataclass(frozen=True, slots=True)
class _Job:
    """The contents of the prepared folder, determined before anything is written."""

    checkpoint: Checkpoint
    options: PrepareOptions
    reader: CheckpointReader
    formats: WeightFormats
    codec: Codec
    layout: Layout
    ranks: tuple[PackedModel, ...]

    @property
    def num_bytes(self) -> int:
        return sum(blob.num_bytes for rank in self.ranks for blob in rank.blobs)


def prepare(
    checkpoint: Checkpoint,
    out: Path,
    options: PrepareOptions,
    *,
    force: bool = False,
    progress: Progress = lambda stage, fraction: None,
    say: Callable[[str], object] = lambda line: None,
) -> Manifest:
    """Write ``checkpoint`` as the prepared folder ``out``.

    ``force``: replace an existing prepared folder after the new one is complete. ``say``: called with a line about each
    removed leftover of earlier runs. Raises ValueError: the model cannot be split or packed as requested, or ``out``
    cannot be created; nothing was written; PrepareError: the disk failed, was full, or returned wrong bytes; the
    partial folder was removed.
    """
    job = _plan(checkpoint, options)

    def check_replaced(folder: Path) -> None:
        if not (folder / MANIFEST).is_file():
            raise ModelError(f"{folder}: exists and is not a prepared folder; give another name, or remove it")
        if not force:
            raise ModelError(f"{folder}: is a prepared folder already; replace it with --force, or give another name")

    with _disk_errors(out), whole_folder(out, check_replaced=check_replaced, say=say) as folder:
        files = _write_small_files(job, folder)
        if lacking := disk_shortage(folder, job.num_bytes):
            raise ModelError(f"{out.parent}: {lacking}, {_SMALLER}")
        manifest = _write_ranks(job, folder, files, progress)
        if damage := read_back(folder, manifest, progress):
            raise PrepareError(
                f"{out}: the bytes read back differ from those written, so nothing was kept; the disk or the memory may be "
                f"faulty: {damage[0]}"
            )
        write_manifest(folder, manifest)
    return manifest


def read_back(folder: Path, manifest: Manifest, progress: Progress) -> list[str]:
    """Check every checksum; returns a line for each damaged part."""
    damage = list(find_damage(folder, manifest, _meter("verify", manifest.num_bytes, progress)))
    progress("verify", 1.0)
    return damage


def _plan(checkpoint: Checkpoint, options: PrepareOptions) -> _Job:
    config, reader, codec = checkpoint.config, checkpoint.reader(), parse_codec(options.codec)
    formats = choose_formats(reader, config, options.quantization)
    layout = split_model(config, formats, options.tp, options.shares)
    dtype: torch.dtype = getattr(torch, options.dtype)
    ranks = tuple(pack_model(config, shard, formats, dtype, codec) for shard in layout.shards)
    check_codec(options.codec, ranks[0].stored, formats)
    return _Job(checkpoint, options, reader, formats, codec, layout, ranks)


def _write_small_files(job: _Job, folder: Path) -> dict[str, str]:
    """Write configuration and tokenizer; returns the files' checksums."""
    config = replace(job.checkpoint.config, dtype=job.options.dtype)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config), indent=1) + "\n")
    job.checkpoint.tokenizer().save(folder)
    if job.checkpoint.generation:
        ends = {"eos_token_id": list(config.eos_token_ids)} if config.eos_token_ids else {}
        generation = {**job.checkpoint.generation, **ends}
        (folder / _GENERATION).write_text(json.dumps(generation, indent=1) + "\n")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _write_ranks(job: _Job, folder: Path, files: dict[str, str], progress: Progress) -> Manifest:
    """Write every rank's file and return the manifest, which is not written yet."""
    config, tp, shards = job.checkpoint.config, job.options.tp, job.layout.shards
    num_plain_bytes = sum(layer.num_bytes for rank in job.ranks for layer in (rank.outer, *rank.plain))
    moved = _meter("prepare", num_plain_bytes + job.num_bytes, progress)
    with ExitStack() as stack, torch.inference_mode():
        paths = [folder / file_name(rank, tp) for rank in range(tp)]
        writers = [stack.enter_context(closing(LargeFileWriter(path))) for path in paths]
        stores = [CheckpointStore(job.reader, config, *each) for each in zip(shards, job.ranks, strict=True)]
        both = list(zip(writers, stores, strict=True))
        for writer, own in both:
            writer.append(own.read_outer(_CPU, moved).numpy().data, moved)
        for layer in range(config.num_layers):
            for writer, own in both:
                buffer = page_aligned(own.stored[layer].num_bytes, _CPU)
                writer.append(own.pack(layer, buffer, moved).numpy().data, moved)
        for writer in writers:
            writer.sync()
    progress("prepare", 1.0)
    return Manifest(
        model=job.checkpoint.name,
        dtype=job.options.dtype,  # pyright: ignore[reportArgumentType]
        shares=job.options.shares,
        codec=job.codec.name,
        packed={name: packed.name for name, packed in job.formats.packed.items()},
        plain=dict(job.formats.plain),
        ranks=tuple(
            RankFile(cuts_of(shard), writer.blobs[0], tuple(writer.blobs[1:]))
            for shard, writer in zip(shards, writers, strict=True)
        ),
        files=files,
    )


def _meter(stage: str, total_bytes: int, progress: Progress) -> Moved:
    """Report moved bytes as progress of a stage. It stays below 1, because the end of the stage reports 1."""
    done_bytes = 0

    def moved(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress(stage, min(_ALMOST, done_bytes / total_bytes))

    return moved


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """Convert the disk's errors to errors that name ``out``."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        if error.errno in _DISK_FULL:
            reason = f"the disk is full; free some space, {_SMALLER}"
        raise PrepareError(f"{out}: cannot be written, so nothing was kept: {reason}") from None
