"""`tightwire serve` with one rank at fault: ``python faulty_server.py FAULT RANK ARGUMENTS``.

Started again by itself as each rank, through the ranks' own entry point; only the rank's body is wrapped.
"""

import sys
import time

from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.model.step import StepPlan
from tightwire.progress import Progress
from tightwire.server.cli.http_process import serve
from tightwire.server.config.flags import make_parser, parse
from tightwire.server.http.listener import open_listener
from tightwire.server.plan.rank_setup import RankIdentity, RankWork
from tightwire.server.ranks import rank_main as rank
from tightwire.server.ranks import worker
from tightwire.server.ranks.processes import Ranks
from tightwire.server.ranks.rank_loop import Follower
from tightwire.server.ranks.reporter import Reporter

HANG_AT_STEP = 20


def run_faulty(identity: RankIdentity, work: RankWork, reporter: Reporter) -> None:
    fault, faulty_rank = sys.argv[2], int(sys.argv[3])
    if identity.rank == faulty_rank:
        {"load": _fail_to_load, "hang": _hang, "sum": _sum_wrongly}[fault]()
    rank.run(identity, work, reporter)


def _fail_to_load() -> None:
    def load(*_: object, **__: object) -> None:
        raise OSError("the disk is on fire")

    rank._load = load  # type: ignore[assignment]


def _sum_wrongly() -> None:
    """One-shot gives the negative of the sum."""
    OneShotAllReduce.__call__ = lambda self, x, phase="", site="", feedback=None: BaseAllReduce.__call__(
        self, x, phase, site
    ).neg()  # type: ignore[method-assign]


def _hang() -> None:
    """Run all steps of the warm-up, then stay in one for ever."""

    class Hanging:
        def __init__(self, runner: rank.ModelRunner) -> None:
            self._runner = runner

        def __getattr__(self, name: str) -> object:
            return getattr(self._runner, name)

        def execute(self, plan: StepPlan) -> Tensor | None:
            if plan.index >= HANG_AT_STEP:
                time.sleep(3600)
            return self._runner.execute(plan)

    init = Follower.__init__
    Follower.__init__ = lambda self, runner, *rest: init(self, Hanging(runner), *rest)  # type: ignore[method-assign,arg-type]


def main() -> int:
    fault, faulty_rank, *arguments = sys.argv[1:]
    config, _ = parse(make_parser("serve", ""), arguments)
    command = (sys.executable, __file__, "rank", fault, faulty_rank)
    parallel = config.parallel
    with (
        open_listener(config.http) as listener,
        Ranks(parallel.num_ranks, command, num_replicas=parallel.dp) as ranks,
    ):
        return serve(config, listener, ranks, Progress(parallel.num_ranks))


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        sys.exit(worker.main(lambda: run_faulty))
    sys.exit(main())
