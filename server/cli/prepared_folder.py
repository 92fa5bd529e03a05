"""Writes or checks a prepared folder, with progress; the folder's path goes to standard output."""

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tightwire.cuda_devices import cuda_devices
from tightwire.model.checkpoint.errors import ModelError, PrepareError
from tightwire.model.open import open_checkpoint
from tightwire.model.prepare import PrepareOptions, read_back
from tightwire.model.prepare import prepare as make_folder
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.model.weights.prepared.manifest import MANIFEST, Manifest, read_manifest
from tightwire.progress import Progress
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.setting import choose_dtype
from tightwire.sizes import format_bytes


def run(config: ServeConfig, out: Path, *, force: bool = False) -> int:
    """Make the folder ``out``. Exit code 0; 2 if refused, 1 after a disk error, 130 and 143 after a signal."""

    def work(progress: Progress) -> None:
        name = config.model.model
        start = time.monotonic()
        checkpoint = open_checkpoint(name, config.model.seed, progress=partial(progress.stage, f"downloading {name}"))
        device = "cuda" if cuda_devices()[0] else "cpu"
        options = PrepareOptions(
            tp=config.parallel.tp,
            shares=config.parallel.tp_split,
            dtype=choose_dtype(config.model, checkpoint.config, device),
            quantization=config.model.quantization,
            codec=WEIGHT_CODECS[config.weights.weight_codec],
        )
        manifest = make_folder(checkpoint, out, options, force=force, progress=progress.stage, say=progress.say)
        progress.close()
        progress.say(_summary(out, manifest, time.monotonic() - start))

    return _run(work, out, f"interrupted; {out} was not written")


def check(folder: Path) -> int:
    """Verify every checksum of a prepared folder. Exit code 0; 1 if a file is damaged, 2 if there is no folder."""

    def work(progress: Progress) -> None:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder")
        if not (folder / MANIFEST).is_file():
            open_checkpoint(str(folder))  # says why, if it is no model or was not finished
            raise ModelError(f"{folder} is not a prepared folder; `tightwire prepare MODEL OUT` makes one")
        manifest, start = read_manifest(folder), time.monotonic()
        damage = read_back(folder, manifest, progress.stage)
        seconds = time.monotonic() - start
        progress.close()
        if damage:
            raise PrepareError("\n  ".join([f"{folder}: damaged parts: {len(damage)}", *damage]))
        progress.say(f"{folder}: every checksum is right ({_rate(manifest.num_bytes, seconds)})")

    return _run(work, folder, f"interrupted; {folder} was not checked completely")


def _run(work: Callable[[Progress], None], folder: Path, interrupted: str) -> int:
    progress = Progress(verbose=True)
    # An exception, so that unfinished files are removed, as after Ctrl-C.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work(progress)
    except (ValueError, RuntimeError) as error:
        progress.say(f"tightwire prepare: {error}")
        return 2 if isinstance(error, ValueError) else 1
    except (KeyboardInterrupt, SystemExit) as signalled:
        progress.say(f"tightwire prepare: {interrupted}")
        return 143 if isinstance(signalled, SystemExit) else 130
    finally:
        progress.close()
        signal.signal(signal.SIGTERM, before)
    sys.stdout.write(f"{folder}\n")
    return 0


def _summary(out: Path, manifest: Manifest, seconds: float) -> str:
    packed = "+".join(dict.fromkeys(manifest.packed.values()))
    kept = f"{packed} and {manifest.dtype}" if packed else manifest.dtype
    codec = "" if manifest.codec == "none" else f", layers encoded as {manifest.codec}"
    ranks = ", ".join(f"rank {rank} {format_bytes(file.num_bytes)}" for rank, file in enumerate(manifest.ranks))
    split = "" if manifest.shares is None else f" --tp-split {','.join(f'{share:g}' for share in manifest.shares)}"
    return (
        f"{manifest.model} in {kept}{codec}: {ranks}; {_rate(manifest.num_bytes, seconds)}\n"
        f"serve it with: tightwire serve {out} --tp {manifest.tp}{split}"
    )


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{format_bytes(num_bytes)} in {seconds:.1f} s, {num_bytes / seconds / 1e6:.0f} MB/s"
