"""Runs ``tightwire prepare``: reads its flags, then imports what writes or checks a prepared folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tightwire.option_flags import add_flags
from tightwire.server.cli.start import interrupts_end_at_once, refuse
from tightwire.server.config.flags import fields_of, parse
from tightwire.server.plan.setting import refuse_wrong_model

_GROUPS = ("model", "parallel", "weights")
_OPTIONS = ("tp", "tp_split", "dtype", "quantization", "weight_codec", "seed")


def prepare(argv: Sequence[str]) -> int:
    """``tightwire prepare``: the folder's path on standard output. Exit code 1: disk error or damage, 2: refused."""
    parser = _make_parser()
    config, args = parse(parser, argv, _GROUPS)
    if args.check and (args.out is not None or set(vars(args)) & {*_OPTIONS, "force"}):
        parser.error("--check takes only the prepared folder: tightwire prepare --check OUT")
    if not args.check and args.out is None:
        parser.error("the following arguments are required: OUT")
    if not args.check:
        try:
            refuse_wrong_model(config)
        except ValueError as error:
            return refuse("prepare", error)
    with interrupts_end_at_once():
        from tightwire.server.cli import prepared_folder
    if args.check or args.out is None:
        return prepared_folder.check(Path(args.model))
    return prepared_folder.run(config, vars(args)["out"], force="force" in args)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tightwire prepare",
        usage="tightwire prepare MODEL OUT [--FLAG VALUE ...], or tightwire prepare --check OUT",
        description="Repack a model for streaming: split over its ranks, packed and encoded once, with checksums. The folder "
        "is a complete model; it does not need the original.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("model", metavar="MODEL", help="as for `serve`; with --check, the folder to check")
    parser.add_argument("out", nargs="?", default=None, type=Path, metavar="OUT", help="the folder to write")
    add_flags(parser, {name: fields_of(_GROUPS)[name] for name in _OPTIONS})
    parser.add_argument("--force", action="store_true", help="replace a prepared folder once the new one is complete")
    parser.add_argument("--check", action="store_true", default=False, help="read a folder and compare every checksum")
    return parser
