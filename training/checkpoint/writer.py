"""Writes checkpoints in a background thread while training continues.

Only ``begin`` and ``complete`` communicate with other ranks. The folder gets its final name after all ranks have
written. A failed write leaves earlier checkpoints unchanged.
"""

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from tightwire.sizes import format_bytes
from tightwire.training.checkpoint.files import TABLE_OF_CONTENTS, Chunk, finish, plan_of, write_chunks
from tightwire.training.checkpoint.folders import file_digests, folder_of, partial_of, prune, publish
from tightwire.training.ranks.control import Control


class Completed(NamedTuple):
    """``error``: why ``folder`` was not published, "" if it was. ``warning``: why old ones were not removed."""

    folder: Path
    error: str
    warning: str


class _Written(NamedTuple):
    """One rank's file of a checkpoint."""

    results: list[WriteResult]
    digests: dict[str, int]
    error: str


class _Write(NamedTuple):
    """A checkpoint that is being written."""

    folder: Path
    plans: Sequence[SavePlan]
    description: Mapping[str, Any]
    own: "Future[_Written]"


class Checkpointer:
    """Writes the checkpoints of one run; all ranks call ``begin`` and ``complete`` at the same steps."""

    def __init__(self, run: Path, control: Control, *, keep: int) -> None:
        self._run, self._control, self._keep = run, control, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._write: _Write | None = None

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is not completed."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether this rank's file is written or has failed."""
        return self._write is not None and self._write.own.done()

    def begin(self, step: int, chunks: Sequence[Chunk], description: Mapping[str, Any]) -> None:
        """Start to write this rank's ``chunks`` in a thread. Collective. The previous checkpoint must be completed."""
        assert self._write is None, "the previous checkpoint is not completed"
        folder, plans = folder_of(self._run, step), self._control.gather(plan_of(chunks))
        own = self._thread.submit(_write_file, partial_of(folder), chunks, plans, self._control.rank)
        self._write = _Write(folder, plans, description, own)

    def complete(self) -> Completed:
        """Wait until all ranks have written, publish the checkpoint and remove old ones. Collective."""
        write, self._write = self._write, None
        assert write is not None, "no checkpoint has begun"
        ranks: list[_Written] = self._control.gather(write.own.result())
        errors, warning = [f"rank {rank}: {own.error}" for rank, own in enumerate(ranks) if own.error], ""
        if self._control.rank == 0:
            partial = partial_of(write.folder)
            try:
                if not errors:
                    finish(partial, write.plans, [own.results for own in ranks])
                    digests = {name: crc for own in ranks for name, crc in own.digests.items()}
                    digests |= file_digests(partial, [TABLE_OF_CONTENTS])
                    publish(partial, write.folder, {**write.description, "digests": digests})
            except OSError as error:
                errors.append(f"rank 0: {error}")
            if errors:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                warning = self._prune()
        errors, warning = self._control.gather((errors, warning))[0]
        return Completed(write.folder, "; ".join(errors), warning)

    def _prune(self) -> str:
        try:
            prune(self._run, self._keep)
        except OSError as error:
            return f"checkpoints older than the newest {self._keep} could not be removed: {error}"
        return ""


def _write_file(folder: Path, chunks: Sequence[Chunk], plans: Sequence[SavePlan], rank: int) -> _Written:
    try:
        results = write_chunks(folder, chunks, plans, rank)
        return _Written(results, file_digests(folder, {result.storage_data.relative_path for result in results}), "")
    except Exception as error:  # noqa: BLE001, ``complete`` reports any failure on all ranks
        # Torch's error for a full disk may not say so, so the message includes the free space.
        free = format_bytes(shutil.disk_usage(folder.parent).free)
        return _Written([], {}, f"{folder.name}: {error} ({free} free on that disk)")
