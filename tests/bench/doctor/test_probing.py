"""A program that hangs or crashes becomes a problem and never stops the doctor."""

import sys
from pathlib import Path

import pytest
from helpers.server.server_process import is_alive, wait_until

from tightwire.bench.doctor.probing import Output, run_probe

SLOW_S = 60.0  # of a program that is to end by itself, on a busy machine


def probe(code: str, limit_s: float = SLOW_S) -> Output:
    return run_probe([sys.executable, "-c", code], limit_s)


def test_output_and_the_time_of_each_piece() -> None:
    output = probe("import sys, time; print(1, flush=True); time.sleep(0.5); print(2); sys.stderr.write('a library')")
    assert (output.data, output.problem) == (b"1\n2\n", None)
    assert output.times_s[-1] - output.times_s[0] >= 0.1


def test_a_hanging_program_is_stopped_and_its_output_kept() -> None:
    output = probe("import time; print('facts', flush=True); time.sleep(600)", 3.0)
    assert (output.data, output.problem) == (b"facts\n", "did not end within 3 s and was stopped")


def test_a_stopped_program_ends_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    probe(
        f"import subprocess, sys; t = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(t.pid)); t.wait()",
        3.0,
    )
    wait_until(lambda: not is_alive(int(pid.read_text())), 5)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (r"raise OSError('the device\nis on fire')", "failed: OSError: the device is on fire"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("import os; os._exit(3)", "exited with code 3"),
        ("import sys; sys.exit('no such driver')", "failed: no such driver"),
    ],
)
def test_a_failure_is_described(code: str, problem: str) -> None:
    assert probe(code).problem == problem


def test_a_program_that_does_not_exist() -> None:
    assert "No such file" in (run_probe(["/no/such/program"], 1.0).problem or "")
