"""The flags and YAML keys of ``ServeConfig``. A flag overrides the file, and the file the default."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from tightwire.cuda_devices import on_gpu
from tightwire.option import flag_of, suggest
from tightwire.option_flags import add_flags, read_yaml
from tightwire.server.config.foreign_flags import ours
from tightwire.server.config.serve import GROUPS, ServeConfig, option_fields

ALL_GROUPS = tuple(GROUPS)
_MODEL_ARGUMENT = "model_argument"  # the model without its flag: `tightwire serve MODEL`


def fields_of(groups: Iterable[str]) -> dict[str, Field[Any]]:
    """The options of some groups of ``ServeConfig``, by field name."""
    return {name: field for name, (group, field) in option_fields().items() if group in groups}


def make_parser(
    verb: str, description: str, groups: Sequence[str] = ALL_GROUPS, *, argument: str = "[MODEL]"
) -> argparse.ArgumentParser:
    """A parser with every option of ``groups`` and ``--config``. ``argument``: ``[MODEL]``, or one that the caller adds."""
    parser = argparse.ArgumentParser(
        prog=f"tightwire {verb}",
        usage=f"tightwire {verb} {argument} [--FLAG VALUE ...] [--config FILE]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if argument == "[MODEL]":
        parser.add_argument(_MODEL_ARGUMENT, nargs="?", metavar="MODEL", help="the same as --model MODEL")
    for group in groups:
        add_flags(parser.add_argument_group(group, GROUPS[group].__doc__), fields_of([group]))
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file of options; flags override it")
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], groups: Sequence[str] = ALL_GROUPS
) -> tuple[ServeConfig, argparse.Namespace]:
    """The options, and all arguments including those the caller added. Invalid ones exit with code 2."""
    args = parse_flags(parser, argv)
    if _MODEL_ARGUMENT in args:
        if "model" in args:
            parser.error(f"two models given: {args.model_argument} and --model {args.model}")
        args.model = args.model_argument
    fields = fields_of(groups)
    try:
        values = read_yaml(args.config, fields) if "config" in args else {}
        values |= {name: value for name, value in vars(args).items() if name in fields}
        if len(names := values.get("served_model_name", ())) > 1 and "model" not in values:
            own = " and ".join(names)
            raise ValueError(f"--served-model-name takes {own}, and no MODEL is left; write MODEL before it")
        if "max_num_batched_tokens" in fields.keys() - values.keys() and on_gpu(values.get("device", "auto")):
            values["max_num_batched_tokens"] = max(4096, values.get("max_num_seqs", 0))  # 512 wait for launches
        return make_config(values), args
    except ValueError as error:
        parser.error(str(error))


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """All arguments. Unknown ones exit with code 2, and name the flag that was probably meant."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:  # first, because argparse reads `-hf` as `-h`
        flag = word.split("=")[0]
        if flag not in known and (text := ours(flag, known)) is not None:
            parser.error(f"unknown argument {flag!r}{text}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = suggest(flag, known, f"; `{parser.prog} --help` lists the flags")
        if flag in map(flag_of, option_fields()):
            hint = "; it is a flag of `tightwire serve`"
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    return args


def refuse_serving_flags(parser: argparse.ArgumentParser, config: ServeConfig) -> None:
    """For verbs without requests: end the program with exit code 2 if a flag is about requests."""
    if config.parallel.allreduce_extra:
        parser.error("--allreduce-extra is for requests to `serve`; leave it out, or name one with --allreduce")
    if config.parallel.dp > 1:
        parser.error(f"--dp {config.parallel.dp} is for requests to `serve`, which replicas share; leave it out")


def make_config(values: Mapping[str, Any]) -> ServeConfig:
    """The config tree with some options set by field name. ValueError: an option group refuses a value."""
    by_group: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        by_group[option_fields()[name][0]][name] = value
    return ServeConfig(**{group: cls(**by_group[group]) for group, cls in GROUPS.items()})
