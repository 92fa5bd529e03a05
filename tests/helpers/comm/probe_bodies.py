"""Probes that misbehave, for the doctor's tests: each is run by name in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tightwire.bench.doctor.facts import Interface, NetworkFacts


def facts(*names: str) -> NetworkFacts:
    return NetworkFacts(interfaces=[Interface(name, "up", 1000, 1500) for name in names])


def well() -> NetworkFacts:
    sys.stdout.write("a library's greeting\n")
    subprocess.run(["echo", "a tool's greeting"], check=True)
    return facts("eth0")


def hang() -> NetworkFacts:
    time.sleep(600)
    return facts()


def hang_later() -> Iterator[NetworkFacts]:
    yield facts("eth0")
    yield facts("eth0", "eth1")
    time.sleep(600)


def hang_in_a_tool() -> NetworkFacts:
    """Its pid goes to the file that PROBE_PID names, so that the test can look for it afterwards."""
    with subprocess.Popen(["sleep", "600"]) as tool:
        Path(os.environ["PROBE_PID"]).write_text(str(tool.pid))
        tool.wait()
    return facts()


def crash() -> NetworkFacts:
    raise OSError("the device\nis on fire")


def die() -> NetworkFacts:
    os.kill(os.getpid(), signal.SIGSEGV)
    return facts()


def say_nothing() -> Iterator[NetworkFacts]:
    yield from ()


def babble() -> Iterator[str]:
    yield "no facts at all"


def leave() -> NetworkFacts:
    os._exit(3)
