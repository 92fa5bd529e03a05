"""Writes checkpoints beside the training: a copy in host memory, a thread that writes it, a name when all ranks have.

Ranks tell each other how far they are with the numbers that they exchange at each step anyway, so nothing here waits for
another rank but the methods that say so. A failed write leaves the checkpoints before it as they are.
"""

import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.storage import WriteResult

from tightwire.comm.sizes import format_bytes
from tightwire.training.checkpoint.digests import file_digests
from tightwire.training.checkpoint.files import TABLE_OF_CONTENTS, files_of, finish, plan_of, write_pieces
from tightwire.training.checkpoint.folders import folder_of, partial_of, prune, publish
from tightwire.training.checkpoint.pieces import SavedPiece
from tightwire.training.ranks.control import Control


class Checkpointer:
    """One for a run; all ranks call ``begin`` and ``complete`` at the same steps."""

    def __init__(self, run: Path, control: Control, *, keep: int) -> None:
        self._run, self._control, self._keep = run, control, keep
        self._write: _Write | None = None
        self._folder = run

    @property
    def writing(self) -> bool:
        """Whether a checkpoint has begun that is not completed."""
        return self._write is not None

    @property
    def written(self) -> bool:
        """Whether this rank's part has been written, or has failed."""
        return self._write is not None and self._write.done

    def begin(self, step: int, pieces: Sequence[SavedPiece], about: Mapping[str, Any]) -> None:
        """Start to write ``pieces``, which are this rank's and nobody else's; collective, returns at once.

        The one before must have been completed.
        """
        assert self._write is None, "the checkpoint before is not completed"
        self._folder = folder_of(self._run, step)
        plans = self._control.gather(plan_of(pieces))
        self._write = _Write(partial_of(self._folder), pieces, plans, self._control.rank, about)

    def complete(self) -> "Completed":
        """Wait for all ranks' writing, and give the checkpoint its name; collective."""
        write, self._write = self._write, None
        assert write is not None, "no checkpoint was begun"
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
                    publish(write.folder, self._folder, {**write.about, "digests": digests})
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
            return f"checkpoints before the newest {self._keep} could not be removed: {error}"
        return ""


class Completed(NamedTuple):
    """``error``: why there is no such folder, "" when there is; ``warning``: what is amiss beside it."""

    folder: Path
    error: str
    warning: str


class _Write:
    """One rank's part of one checkpoint, and the thread that writes it."""

    def __init__(
        self, folder: Path, pieces: Sequence[SavedPiece], plans: Sequence[Any], rank: int, about: Mapping[str, Any]
    ) -> None:
        self.folder, self.plans, self.about = folder, plans, about
        self.results: list[WriteResult] = []
        self.digests: dict[str, int] = {}
        self.error = ""
        self._thread = threading.Thread(target=self._run, args=(pieces, rank), name="checkpoint")
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self, pieces: Sequence[SavedPiece], rank: int) -> None:
        try:
            self.results = write_pieces(self.folder, pieces, self.plans, rank)
            self.digests = file_digests(self.folder, files_of(self.results))
        except Exception as error:  # noqa: BLE001, whatever it is goes to the ranks that complete it
            # Torch reports a full disk in words of its own, so the room left is told beside them.
            free = format_bytes(shutil.disk_usage(self.folder.parent).free)
            self.error = f"{self.folder.name}: {error} ({free} left on that disk)"
