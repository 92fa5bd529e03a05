"""Writes checkpoints in a background thread while training continues.

Only ``begin`` and ``complete`` communicate with other ranks. The folder gets its final name after all ranks have
written. A failed write leaves earlier checkpoints unchanged.
"""

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.storage import WriteResult

from tightwire.comm.sizes import format_bytes
from tightwire.training.checkpoint.files import TABLE_OF_CONTENTS, Chunk, files_of, finish, plan_of, write_chunks
from tightwire.training.checkpoint.folders import file_digests, folder_of, partial_of, prune, publish
from tightwire.training.ranks.control import Control


class Checkpointer:
    """Writes the checkpoints of one run; all ranks call ``begin`` and ``complete`` at the same steps."""

    def __init__(self, run: Path, control: Control, *, keep: int) -> None:
        self._run, self._control, self._keep = run, control, keep
        self._write: _Write | None = None
        self._folder = run

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun and is not completed."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether this rank's file is written or has failed."""
        return self._write is not None and self._write.done

    def begin(self, step: int, chunks: Sequence[Chunk], description: Mapping[str, Any]) -> None:
        """Start to write this rank's ``chunks`` in a thread. Collective. The previous checkpoint must be completed."""
        assert self._write is None, "the previous checkpoint is not completed"
        self._folder = folder_of(self._run, step)
        plans = self._control.gather(plan_of(chunks))
        self._write = _Write(partial_of(self._folder), chunks, plans, self._control.rank, description)

    def complete(self) -> "Completed":
        """Wait until all ranks have written, publish the checkpoint and remove old ones. Collective."""
        write, self._write = self._write, None
        assert write is not None, "no checkpoint has begun"
        write.join()
        parts = self._control.gather((write.results, write.digests, write.error))
        errors = [f"rank {rank}: {error}" for rank, (_, _, error) in enumerate(parts) if error]
        warning = ""
        if self._control.rank == 0:
            try:
                if not errors:
                    finish(write.folder, write.plans, [results for results, _, _ in parts])
                    digests = {name: crc for _, digests, _ in parts for name, crc in digests.items()}
                    digests |= file_digests(write.folder, [TABLE_OF_CONTENTS])
                    publish(write.folder, self._folder, {**write.description, "digests": digests})
            except OSError as error:
                errors.append(f"rank 0: {error}")
            if errors:
                shutil.rmtree(write.folder, ignore_errors=True)
            else:
                warning = self._prune()
        errors, warning = self._control.gather((errors, warning))[0]
        return Completed(self._folder, "; ".join(errors), warning)

    def _prune(self) -> str:
        try:
            prune(self._run, self._keep)
        except OSError as error:
            return f"checkpoints older than the newest {self._keep} could not be removed: {error}"
        return ""


class Completed(NamedTuple):
    """``error``: why ``folder`` was not published, "" if it was. ``warning``: why old ones were not removed."""

    folder: Path
    error: str
    warning: str


class _Write:
    """One rank's file of one checkpoint, and the thread that writes it."""

    def __init__(
        self, folder: Path, chunks: Sequence[Chunk], plans: Sequence[Any], rank: int, description: Mapping[str, Any]
    ) -> None:
        self.folder, self.plans, self.description = folder, plans, description
        self.results: list[WriteResult] = []
        self.digests: dict[str, int] = {}
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(chunks, rank), name="checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self, chunks: Sequence[Chunk], rank: int) -> None:
        try:
            self.results = write_chunks(self.folder, chunks, self.plans, rank)
            self.digests = file_digests(self.folder, files_of(self.results))
        except Exception as error:  # noqa: BLE001, ``complete`` reports any failure on all ranks
            # Torch's error for a full disk may not say so, so the message includes the free space.
            free = format_bytes(shutil.disk_usage(self.folder.parent).free)
            self.error = f"{self.folder.name}: {error} ({free} free on that disk)"
