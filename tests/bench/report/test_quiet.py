"""What others used of the cores leaves out what the bench's own processes used."""

import time

from harness import fork_server

from tightwire.bench.report.quiet import OthersWatch


def _compute(seconds: float) -> None:
    while time.process_time() < seconds:
        pass


def _fork(seconds: float) -> None:
    process = fork_server().Process(target=_compute, args=(seconds,))
    process.start()
    process.join()


def test_processes_of_the_fork_server_are_ours() -> None:
    _fork(0.0)  # the server's own start
    watch = OthersWatch()
    before_s = watch._ours_s()
    _fork(0.5)
    assert watch._ours_s() - before_s > 0.4
