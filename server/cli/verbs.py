"""Runs ``serve``, ``generate``, ``explain``, ``prepare`` and ``pull``. Ranks start before heavy modules load here."""

import argparse
import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import open_wire
from tightwire.comm.policy.error_budget import parse_error_budget
from tightwire.kernels.cpu.library import available
from tightwire.model.checkpoint.header import has_copy
from tightwire.model.weights import WEIGHT_CODECS
from tightwire.server.config.flags import (
    add_flags,
    fields_of,
    make_parser,
    parse,
    refuse_serving_flags,
)
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.option import option, require
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import resolve_hosts
from tightwire.server.hosts.place import HostPlace, NotNowError, wait_for_place
from tightwire.server.http.listener import PortTakenError, check_files, open_listener, remove_socket
from tightwire.server.plan.progress import START_STAGES, Progress
from tightwire.server.plan.setting import refuse_early, refuse_wrong_model

if TYPE_CHECKING:
    from tightwire.server.ranks.processes import Ranks

COMM_GROUPS = ("model", "parallel", "engine")
_EXPLAIN_GROUPS = (*COMM_GROUPS, "adapters")
_PREPARE_GROUPS = ("model", "parallel")
_PREPARE_OPTIONS = ("tp", "tp_split", "dtype", "quantization", "seed")
# A launcher may name a host before the name has an address: Kubernetes adds a pod's name some seconds after its start.
_NAME_S = 120.0
_OFFLINE_GROUPS = ("model", "parallel", "engine", "weights", "timeouts")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """The flags of ``generate`` alone."""

    max_tokens: int = option(128, "tokens to add", metavar="N")
    temperature: float = option(0.0, "0: always the most likely token", metavar="T")
    lora: str | None = option(None, "answer with this LoRA adapter, a folder that PEFT wrote", metavar="FOLDER")

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        require(self.lora != "", "lora", self.lora, "left out, or not empty")


def serve(argv: Sequence[str]) -> int:
    """``tightwire serve``: exit code 0 after a signal, 1 if a rank or the network is lost, 2 if refused."""
    with interrupts_end_at_once():
        return _serve(argv)


def _serve(argv: Sequence[str]) -> int:
    parser = make_parser("serve", "Serve a model over the OpenAI HTTP API, split over rank processes.")
    config, _ = parse(parser, argv)
    by_hand = config.hosts.master_addr is not None
    try:
        config, notes = resolve_hosts(config, os.environ)
        _say(*notes)
        place = wait_for_place(config.hosts, 0.0 if by_hand else _NAME_S, _say) if config.hosts.several else None
    except NotNowError as error:
        return _refuse("serve", error, exit_code=1)
    except ValueError as error:
        return _refuse("serve", error)
    if place is not None:
        _say(place.describe())
    try:
        check_files(config.http)
        if place is None or place.node == 0 or has_copy(config.model.model):
            refuse_wrong_model(config)
        else:
            _say(f"this host has no copy of {config.model.model}; node 0 will send it")
        _load_kernels()
        refuse_early(config)
        listener = open_listener(config.http)
    except (ValueError, PortTakenError) as error:
        return _refuse("serve", error)
    with listener, ExitStack() as stack:
        stack.callback(remove_socket, config.http)
        try:
            ranks = _start_ranks(config, stack, place)
        except ValueError as error:
            return _refuse("serve", error)
        progress = Progress(
            len(ranks.numbers) if place and place.node else config.parallel.num_ranks,
            START_STAGES,
            verbose=config.http.log_level == "debug",
        )
        progress.stage("import", 0.0)
        gc.disable()  # what is imported stays: looking for garbage would take a fifth of the time
        launch = importlib.import_module("tightwire.server.cli.launch")
        gc.freeze()
        gc.enable()
        return launch.serve(config, listener, ranks, progress)


def _say(*lines: str) -> None:
    sys.stderr.writelines(f"{line}\n" for line in lines)


def generate(argv: Sequence[str]) -> int:
    """``tightwire generate``: text on standard output, everything else on standard error; exit codes as ``serve``."""
    parser = make_parser(
        "generate", "Continue one prompt on the terminal, without a server.", _OFFLINE_GROUPS, argument="PROMPT"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; no chat template is applied")
    add_flags(parser, {own.name: own for own in fields(AnswerOptions)})
    config, args = parse(parser, argv, _OFFLINE_GROUPS)
    refuse_serving_flags(parser, config)
    try:
        answer = AnswerOptions(**{own.name: vars(args)[own.name] for own in fields(AnswerOptions) if own.name in args})
    except ValueError as error:
        parser.error(str(error))
    if answer.lora is not None:
        config = replace(config, adapters=AdapterOptions(lora=(f"lora={answer.lora}",)))
    with ExitStack() as stack:
        try:
            refuse_wrong_model(config)
            _load_kernels()
            refuse_early(config)
            ranks = _start_ranks(config, stack)
        except ValueError as error:
            return _refuse("generate", error)
        progress = Progress(config.parallel.num_ranks, START_STAGES)
        progress.stage("import", 0.0)
        with interrupts_end_at_once():
            offline = importlib.import_module("tightwire.server.cli.offline")
        try:
            return offline.generate(config, ranks, progress, args.prompt, answer)
        except KeyboardInterrupt:
            return 130


def pull(argv: Sequence[str]) -> int:
    """``tightwire pull``: the file's path on standard output; exit code 1 if it cannot be fetched."""
    catalog = importlib.import_module("tightwire.model.checkpoint.catalog")
    parser = argparse.ArgumentParser(prog="tightwire pull", description="Fetch a known model into the cache folder.")
    parser.add_argument(
        "name",
        nargs="?",
        default="smollm2-135m",
        choices=sorted(catalog.CATALOG),
        metavar="NAME",
        help=f"one of {', '.join(sorted(catalog.CATALOG))} (default: %(default)s)",
    )
    name = parser.parse_args(argv).name
    progress = Progress()
    try:
        path = catalog.pull(name, progress=lambda fraction: progress.stage(f"downloading {name}", fraction))
    except ValueError as error:
        return _refuse("pull", error, exit_code=1)
    finally:
        progress.close()
    sys.stdout.write(f"{path}\n")
    return 0


def explain(argv: Sequence[str]) -> int:
    """``tightwire explain``: exit code 0, or 2 for options that are refused."""
    parser = make_parser(
        "explain", "Show which AllReduce sums which message of a model, its cost, and the reason.", _EXPLAIN_GROUPS
    )
    parser.add_argument(
        "--error-budget",
        dest="comm_error_budget",
        type=parse_error_budget,
        metavar="E",
        help="the same as --comm-error-budget E",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    parser.add_argument(
        "--network",
        action="store_true",
        help="between the hosts of the last server whose node 0 was here, as it probed them",
    )
    config, args = parse(parser, argv, _EXPLAIN_GROUPS)
    refuse_serving_flags(parser, config)
    with interrupts_end_at_once():
        module = importlib.import_module("tightwire.server.cli.explain")
        return module.run(at_least_two_ranks(config), "json" in args, "network" in args)


def at_least_two_ranks(config: ServeConfig) -> ServeConfig:
    """Use two ranks in place of one, which has no AllReduce; the printed setting shows it."""
    if config.parallel.tp > 1:
        return config
    return replace(config, parallel=replace(config.parallel, tp=2, tp_split=None))


def prepare(argv: Sequence[str]) -> int:
    """``tightwire prepare``: the folder's path on standard output. Exit code 1: disk error or damage, 2: refused."""
    parser = _prepare_parser()
    config, args = parse(parser, argv, _PREPARE_GROUPS)
    if not args.check and args.out is None:
        parser.error("the following arguments are required: OUT")
    if args.check and (args.out is not None or set(vars(args)) & {*_PREPARE_OPTIONS, "weight_codec", "force"}):
        parser.error("--check takes only the prepared folder: tightwire prepare --check OUT")
    with interrupts_end_at_once():
        module = importlib.import_module("tightwire.server.cli.prepare")
    if args.check:
        return module.check(Path(args.model))
    return module.run(
        config, args.out, weight_codec=getattr(args, "weight_codec", "none"), force=getattr(args, "force", False)
    )


def _prepare_parser() -> argparse.ArgumentParser:
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
    options = fields_of(_PREPARE_GROUPS)
    add_flags(parser, {name: options[name] for name in _PREPARE_OPTIONS})
    parser.add_argument(
        "--weight-codec",
        choices=tuple(WEIGHT_CODECS),
        help="codec of the layers' unpacked matrices on disk; they are decoded after the transfer, so it saves transferred "
        "bytes, not memory (default: none)",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace an existing prepared folder once the new one is complete"
    )
    parser.add_argument(
        "--check", action="store_true", default=False, help="read a prepared folder and compare every checksum"
    )
    return parser


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process silently; during imports it may print a traceback or be lost. Main thread only."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _load_kernels() -> None:
    """Load or compile the kernels before there are ranks; the progress has no thread when those are started."""
    progress = Progress()
    progress.stage("loading the CPU kernels", 0.0)
    available()
    progress.close()


def _start_ranks(config: ServeConfig, stack: ExitStack, place: HostPlace | None = None) -> "Ranks":
    """Start the wire between the ranks, if any, then the ranks. ValueError: this machine cannot create the wire."""
    options, wire = config.parallel, None
    if options.link is not None:
        num_nodes = options.wire_nodes
        wire = stack.enter_context(
            open_wire(
                parse_link(options.link),
                num_nodes=num_nodes,
                ranks_per_node=options.tp // num_nodes,
                emulation=options.link_emulation,
            )
        )
    ranks = importlib.import_module("tightwire.server.ranks.processes").Ranks(
        options.num_ranks,
        num_nodes=options.nodes,
        num_replicas=options.dp,
        shares_weights=config.weights.weights in ("auto", "partition"),
        wire=wire,
        place=place,
    )
    return stack.enter_context(ranks)


def _refuse(verb: str, error: Exception, exit_code: int = 2) -> int:
    sys.stderr.write(f"tightwire {verb}: {error}\n")
    return exit_code
