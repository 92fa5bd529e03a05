"""The command line: finds the verb in one table and imports only what that verb needs."""

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

import tightwire
from tightwire.option import suggest

# Verb -> ("module:function", one line of help). The function takes the remaining arguments and returns an exit code.
VERBS = {
    "serve": ("tightwire.server.cli.serve:serve", "serve a model over the OpenAI HTTP API, split over ranks"),
    "generate": ("tightwire.server.cli.generate:generate", "continue one prompt on the terminal, without a server"),
    "chat": ("tightwire.server.cli.chat:main", "chat on the terminal with a running server"),
    "bench": ("tightwire.bench.cli:main", "measure; `tightwire bench --help` lists what"),
    "tune": ("tightwire.bench.cli:tune", "measure every AllReduce on this host; `serve` then chooses by the results"),
    "explain": ("tightwire.server.cli.explain:explain", "show which AllReduce sums which message of a model, and why"),
    "doctor": ("tightwire.bench.doctor.cli:main", "check this machine: devices, links, and which options to use"),
    "pull": ("tightwire.server.cli.pull:pull", "fetch a model of the catalog into the cache"),
    "train": ("tightwire.post_training:train", "pre-train or fine-tune a model, alone or under torchrun"),
    "prepare": (
        "tightwire.server.cli.prepare:prepare",
        "repack a model for streaming, with checksums, or check such a folder",
    ),
}

# What `tightwire` alone prints.
_FIRST = """
  tightwire serve --tp 2   serve a small chat model on two ranks, at http://127.0.0.1:8000
  tightwire chat           talk to it, in another terminal
  tightwire doctor         what this machine can run, and with which options
  tightwire bench ttft     time to the first token, by AllReduce

`tightwire --help` lists all verbs.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 1 failed while running or not possible now, 2 refused before anything was
    started, 130 interrupted, 141 nobody reads the output any more.
    """
    _open_standard_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as shells report it; whoever pressed Ctrl-C knows
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends with 1, and has opened /dev/null in its place
            return 128 + signal.SIGPIPE
        raise
    except OSError as error:
        if not (broken := [number for number in (1, 2) if _is_broken(number, error)]):
            raise
        for number in broken:  # what is still buffered cannot be written either when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE  # as shells report it: `| head` has read enough
        sys.stderr.write(f"tightwire: the output cannot be written: {error.strerror}\n")
        return 1


def _open_standard_streams() -> None:
    """Open /dev/null in place of a closed stream. Bytes that are no text are read, and characters the terminal lacks are escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
            os.set_inheritable(getattr(sys, name).fileno(), True)  # else ranks have it closed again
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _is_broken(number: int, error: OSError) -> bool:
    """Whether standard output or error (1, 2) is why ``error`` was raised: a further write to it fails alike."""
    stream = sys.stdout if number == 1 else sys.stderr
    try:
        stream.flush()  # what could not be written is still in the buffer
        if number == 1 and getattr(stream, "write_through", False):  # with PYTHONUNBUFFERED it is not
            os.write(number, b"\n")
    except OSError as again:
        return again.errno == error.errno
    return False


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        sys.stdout.write(f"{tightwire.__doc__}\n{_FIRST}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0
    if verb in ("-V", "--version"):
        sys.stdout.write(f"tightwire {tightwire.__version__}\n")
        return 0
    if verb not in VERBS:
        sys.stderr.write(f"tightwire: unknown verb {verb!r}{suggest(verb, VERBS)}\n")
        return 2
    module, function = VERBS[verb][0].split(":")
    return getattr(importlib.import_module(module), function)(rest)


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "".join(f"  {verb:<{width}}  {text}\n" for verb, (_, text) in VERBS.items())
    return (
        "usage: tightwire VERB [ARGUMENT ...]\n\n"
        f"{tightwire.__doc__}\n\n{verbs}\n"
        "`tightwire VERB --help` explains each flag with its default; `tightwire --version` prints the version.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
