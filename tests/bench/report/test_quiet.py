"""What others used of the cores leaves out what the bench's own processes used."""

import multiprocessing
import time

from tightwire.bench.report.quiet import OthersWatch


def _compute(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def test_processes_of_the_fork_server_are_ours() -> None:
    watch = OthersWatch()
    before_s = watch._ours_s()
    process = multiprocessing.get_context("forkserver").Process(target=_compute, args=(0.5,))
    process.start()
    process.join()
    assert watch._ours_s() - before_s > 0.4
