"""Ranks without a model: ``python rank_bodies.py NAME`` is a rank process whose body is the function NAME below."""

import os
import sys
import time

from tightwire.comm.errors import PeerLostError
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.ranks import worker
from tightwire.server.ranks.reporter import Reporter

imported_by = 0  # the id of the process that forks the ranks


def tell(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Say what it was told and where it runs, then end."""
    threads, has_torch = os.environ["OMP_NUM_THREADS"], "torch" in sys.modules
    log_level, has_store = os.environ["TORCH_CPP_LOG_LEVEL"], str(identity.store_fd is not None)
    for text in (work.location, threads, log_level, has_store, "torch" if has_torch else "no torch yet"):
        with reporter.stage(text):
            pass


def descend(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Say which process imported the body, whose child this one is, and how many pipes it has beside its output."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) not in (1, 2)]
    num_pipes = sum(os.path.exists(link) and os.readlink(link).startswith("pipe:") for link in links)
    for text in (str(imported_by), str(os.getppid()), str(num_pipes)):
        with reporter.stage(text):
            pass


def sleep(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """A step that does not end."""
    reporter.begin("step", 4)
    for number in range(3):
        reporter.ledger.begin("all_reduce", "ring", 8)
        if number < 2:
            reporter.ledger.end(8)
    time.sleep(600)


def fail(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    reporter.begin("step", 4)
    raise ValueError("out of luck")


def lose_peer(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    raise PeerLostError("rank 1 is gone", [1])


def import_body() -> worker.Body:
    global imported_by
    imported_by = os.getpid()
    return globals()[sys.argv[1]]


if __name__ == "__main__":
    sys.exit(worker.main(import_body))
