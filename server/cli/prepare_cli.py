"""Parses the options of ``tightwire prepare``, and imports torch only after they are known to be valid."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from tightwire.model.weights import WEIGHT_CODECS
from tightwire.server.cli.interrupts import interrupts_end_at_once
from tightwire.server.config.flags import add_flags, fields_of, parse

_GROUPS = ("model", "parallel")
_OPTIONS = ("tp", "tp_split", "dtype", "quantization", "seed")


def prepare(argv: Sequence[str]) -> int:
    """``tightwire prepare``: the folder's path on standard output.

    Exit code 0; 1 after a disk error or if ``--check`` finds damage, 2 if refused, 130 and 143 after Ctrl-C and
    SIGTERM.
    """
    parser = _make_parser()
    config, args = parse(parser, argv, _GROUPS)
    if not args.check and args.out is None:
        parser.error("the following arguments are required: OUT")
    if args.check and (args.out is not None or set(vars(args)) & {*_OPTIONS, "weight_codec", "force"}):
        parser.error("--check wants the prepared folder alone: tightwire prepare --check OUT")
    with interrupts_end_at_once():
        module = importlib.import_module("tightwire.server.cli.prepare")
    if args.check:
        return module.check(Path(args.model))
    return module.run(
        config, args.out, weight_codec=getattr(args, "weight_codec", "none"), force=getattr(args, "force", False)
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightwire prepare",
        usage="tightwire prepare MODEL OUT [--FLAG VALUE ...], or tightwire prepare --check OUT",
        description="Repack a model for streaming: cut for its ranks, packed and encoded once, with checksums. The folder "
        "is a model of its own; the one that it was made from may go away.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", metavar="MODEL", help="as of `serve`; with --check, the folder to be checked")
    parser.add_argument("out", nargs="?", default=None, type=Path, metavar="OUT", help="the folder to be made")
    fields = fields_of(_GROUPS)
    add_flags(parser, {name: fields[name] for name in _OPTIONS})
    parser.add_argument(
        "--weight-codec",
        choices=tuple(WEIGHT_CODECS),
        help="what matrices of layers that are plain numbers become on the disk, to be decoded when they are there: fewer "
        "bytes to move, not fewer in memory (default: none)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace a prepared folder that is there, once the new one is whole"
    )
    parser.add_argument(
        "--check", action="store_true", default=False, help="read a prepared folder and compare every checksum"
    )
    return parser
