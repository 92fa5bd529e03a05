"""Forks the rank processes of a host from one that has imported torch, and runs a rank in each.

So a host imports once for all its ranks, which share the memory of what is imported. This process ends when it has forked them; then
they are children of its parent. Only the thread that forks exists in them, so nothing that is imported may start one.
"""

import contextlib
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
from tightwire.parent_death import await_adoption, die_at_end_of_stdin, end_stopped_parent
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
    """Fork the ranks, or run one to its end, in a process that was forked. ``import_body``: tests have their own."""
    identities, own_id = _read_line(tuple[RankIdentity, ...]), os.getpid()
    with importing():
        try:
            imported = import_body()
        except BaseException as error:  # noqa: BLE001 - each rank tells it to the parent
            imported = error
    for identity in identities:
        try:
            is_rank = not os.fork()
        except OSError as error:
            have = "no process or memory is left to this user or container"
            sys.stderr.write(f"rank {identity.rank} cannot be forked: {error.strerror}; {have}\n")
            return 1
        if is_rank:
            for fd in set[int]().union(*(each.fds for each in identities)) - identity.fds:
                os.close(fd)
            with contextlib.suppress(BrokenPipeError):  # the parent has died
                os.write(identity.work_fd, b"%d" % os.getpid())
            return _run_rank(identity, imported) if await_adoption(own_id, identity.parent_pid) else 1
    return 0


def _run_rank(identity: RankIdentity, imported: Body | BaseException) -> int:
    """Run one rank to its end, and return the exit code."""
    os.dup2(identity.work_fd, sys.stdin.fileno())
    os.close(identity.work_fd)
    if identity.node is not None:
        identity.node.enter()
    logging.basicConfig(format=f"%(asctime)s %(levelname)s rank {identity.rank} %(name)s: %(message)s")
    work: queue.SimpleQueue[RankWork] = queue.SimpleQueue()
    threading.Thread(target=_listen_to_parent, args=(work,), daemon=True).start()
    reporter = Reporter(identity.rank, identity.to_parent, identity.reporter)
    try:
        with reporter.stage("import"):
            if isinstance(imported, BaseException):
                raise imported
        reporter.begin("waiting for the model's name")
        own = work.get()
        if identity.num_local < identity.world_size:  # several hosts; they notice a stopped server after this time
            watch = (identity.parent_pid, own.config.timeouts.rank_timeout_s + _AFTER_OTHERS_S)
            threading.Thread(target=end_stopped_parent, args=watch, daemon=True).start()
        imported(identity, own, reporter)
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
        os._exit(1)  # standard input ended: the parent is gone
    return msgspec.json.decode(line, type=kind)


def _listen_to_parent(work: queue.SimpleQueue[RankWork]) -> None:
    """Read the work, then wait for the end of standard input, which means that the parent is gone."""
    work.put(_read_line(RankWork))
    die_at_end_of_stdin()


if __name__ == "__main__":
    exit_code = main()
    # Threads of libraries may not end on their own; our output is flushed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
