"""Ranks without a model: ``python rank_bodies.py NAME`` is a rank process whose body is the function NAME below."""

import os
import sys
import time

from tightwire.comm.errors import PeerLostError
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.ranks import worker
from tightwire.server.ranks.reporter import Reporter


def tell(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    """Say what it was told and where it runs, then end."""
    threads, has_torch = os.environ["OMP_NUM_THREADS"], "torch" in sys.modules
    log_level, has_store = os.environ["TORCH_CPP_LOG_LEVEL"], str(identity.store_fd is not None)
    for text in (work.location, threads, log_level, has_store, "torch" if has_torch else "no torch yet"):
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


if __name__ == "__main__":
    sys.exit(worker.main(lambda: globals()[sys.argv[1]]))
