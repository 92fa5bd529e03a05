"""A probe's process: ``python -m tightwire.bench.doctor.child MODULE:FUNCTION`` writes facts, a line of JSON each."""

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Iterator

import msgspec

_PR_SET_PDEATHSIG = 1


def main(target: str) -> None:
    """Run the probe. What libraries print goes to standard error, so that standard output has facts alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a doctor that is killed leaves no probe behind
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)()
        for facts in result if isinstance(result, Iterator) else [result]:
            out.write(msgspec.json.encode(facts) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # libraries' own threads and destructors have nothing left to say
