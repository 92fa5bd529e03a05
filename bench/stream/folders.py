"""Prepared folders for the run: made before the ranks start, one for each codec, and removed at its end."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tightwire.bench.stream.cells import SOURCES
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.model.open import Checkpoint
from tightwire.model.prepare import PrepareOptions, prepare
from tightwire.model.weights import WEIGHT_CODECS


@contextmanager
def prepared_folders(
    checkpoint: Checkpoint, options: StreamBenchOptions, num_ranks: int, console: Console
) -> Iterator[Mapping[str, str]]:
    """Folders by codec, for those arms that read one; beside the results, so that the disk is the one that was chosen.

    Raises:
        ValueError, PrepareError: one cannot be made.
    """
    codecs = dict.fromkeys(arm.codec for arm in options.arms if SOURCES[arm.source].is_prepared)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stream-", dir=options.output) as place:
        folders: dict[str, str] = {}
        for codec in codecs:
            folder = Path(place) / codec
            console.print(f"tp {num_ranks}: preparing {options.model}, layers in {codec}")
            prepare(
                checkpoint,
                folder,
                PrepareOptions(
                    tp=num_ranks, dtype=options.dtype, quantization=options.quantization, codec=WEIGHT_CODECS[codec]
                ),
            )
            folders[codec] = str(folder)
        yield folders
