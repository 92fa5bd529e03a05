"""Starts one rank process, and reports to its parent. Imports no torch, so that heartbeats start early."""

import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tightwire.comm.errors import CommError
from tightwire.comm.link.wire import LinkTooFastError
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.parent_death import die_at_end_of_stdin, end_stopped_parent
from tightwire.progress import importing
from tightwire.server.ipc.messages import Failed
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.ranks.reporter import Reporter

# Errors whose message alone tells the user what to do about a file, a disk or an option. Others get a traceback.
_TOLD_IN_FULL = (LinkTooFastError, ModelError, WeightsError)
_AFTER_OTHERS_S = 1.0

_T = TypeVar("_T")
Body = Callable[[RankIdentity, RankWork, Reporter], None]


def _import_body() -> Body:
    from tightwire.server.ranks import rank_main  # torch and the model

    return rank_main.run


def main(import_body: Callable[[], Body] = _import_body) -> int:
    """Run one rank to its end. The body that is imported runs once the work is known; tests have their own."""
    identity = _read_line(RankIdentity)
    if os.getppid() != identity.parent_pid:
        return 1  # the parent died before the kernel was asked to watch it
    logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {identity.rank} %(name)s: %(message)s")
    work: queue.SimpleQueue[RankWork] = queue.SimpleQueue()
    threading.Thread(target=_listen_to_parent, args=(work,), daemon=True).start()
    reporter = Reporter(identity.rank, identity.to_parent, identity.reporter)
    try:
        with reporter.stage("import"), importing():
            run = import_body()
        reporter.begin("waiting for the model's name")
        own = work.get()
        if identity.num_local < identity.world_size:  # several hosts; they notice a stopped server after this time
            watch = (identity.parent_pid, own.config.timeouts.rank_timeout_s + _AFTER_OTHERS_S)
            threading.Thread(target=end_stopped_parent, args=watch, daemon=True).start()
        run(identity, own, reporter)
    except BaseException as error:  # noqa: BLE001 - the parent must hear of every error
        text = " ".join(str(error).split())
        reporter.send(
            Failed(
                rank=identity.rank,
                doing=reporter.doing,
                message=": ".join(filter(None, (type(error).__name__, text))),
                traceback="" if isinstance(error, _TOLD_IN_FULL) else traceback.format_exc(),
                symptom=isinstance(error, CommError),
            )
        )
        return 1
    finally:
        reporter.close()
    return 0


def _read_line(kind: type[_T]) -> _T:
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(1)  # the pipe ended: the parent is gone
    return msgspec.json.decode(line, type=kind)


def _listen_to_parent(work: queue.SimpleQueue[RankWork]) -> None:
    """Read the second line, then wait for the end of the pipe, which means that the parent is gone."""
    work.put(_read_line(RankWork))
    die_at_end_of_stdin()


if __name__ == "__main__":
    exit_code = main()
    # Threads of libraries may not end on their own; our output is flushed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
