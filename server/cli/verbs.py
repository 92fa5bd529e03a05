"""Parses the options of ``serve``, ``generate`` and ``pull``, and runs them; imports heavy modules only when needed.

Starts the ranks before this process imports heavy modules, so that both import at the same time.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import open_wire
from tightwire.server.cli.interrupts import interrupts_end_at_once
from tightwire.server.config.flags import make_parser, parse, refuse_allreduce_extra, refuse_replicas
from tightwire.server.config.serve import ServeConfig

if TYPE_CHECKING:
    from tightwire.server.ranks.processes import Ranks

_OFFLINE_GROUPS = ("model", "parallel", "engine", "weights", "timeouts")


def serve(argv: Sequence[str]) -> int:
    """``tightwire serve``: exit code 0 after a signal, 1 if a rank is lost, 2 if refused.

    A signal that arrives before ``launch`` can handle it ends the process by default.
    """
    with interrupts_end_at_once():
        return _serve(argv)


def _serve(argv: Sequence[str]) -> int:
    parser = make_parser("serve", "Serve a model over the OpenAI HTTP API, split over rank processes.")
    config, _ = parse(parser, argv)
    listening = importlib.import_module("tightwire.server.http.listener")
    try:
        listener = listening.open_listener(config.http)
    except listening.PortTakenError as error:
        return _refuse("serve", error)
    with listener, ExitStack() as stack:
        try:
            ranks = _start_ranks(config, stack)
        except ValueError as error:
            return _refuse("serve", error)
        progress = importlib.import_module("tightwire.server.plan.progress").make_progress(config.parallel.num_ranks)
        return importlib.import_module("tightwire.server.cli.launch").serve(config, listener, ranks, progress)


def generate(argv: Sequence[str]) -> int:
    """``tightwire generate``: text on standard output, everything else on standard error; exit codes as ``serve``."""
    parser = make_parser(
        "generate", "Continue one prompt on the terminal, without a server.", _OFFLINE_GROUPS, argument="PROMPT"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue, as it is: no chat template")
    parser.add_argument(
        "--max-tokens", type=_at_least(1, int), default=128, metavar="N", help="tokens to add (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=_at_least(0, float), default=0.0, metavar="T", help="0: always the likeliest (default: 0)"
    )
    config, args = parse(parser, argv, _OFFLINE_GROUPS)
    refuse_allreduce_extra(parser, config)
    refuse_replicas(parser, config)
    with ExitStack() as stack:
        try:
            ranks = _start_ranks(config, stack)
        except ValueError as error:
            return _refuse("generate", error)
        with interrupts_end_at_once():
            progress = importlib.import_module("tightwire.server.plan.progress").make_progress(
                config.parallel.num_ranks
            )
            offline = importlib.import_module("tightwire.server.cli.offline")
        try:
            return offline.generate(
                config,
                ranks,
                progress,
                prompt=args.prompt,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
            )
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
    progress = importlib.import_module("tightwire.server.plan.progress").make_progress(1)
    try:
        path = catalog.pull(name, progress=lambda fraction: progress.fetching(name, fraction))
    except ValueError as error:
        return _refuse("pull", error, exit_code=1)
    finally:
        progress.close()
    sys.stdout.write(f"{path}\n")
    return 0


def _start_ranks(config: ServeConfig, stack: ExitStack) -> "Ranks":
    """Start the wire between the ranks, if any, then the ranks; ``stack`` ends the ranks first.

    Raises:
        ValueError: this machine cannot create the wire.
    """
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
    )
    return stack.enter_context(ranks)


def _refuse(verb: str, error: Exception, exit_code: int = 2) -> int:
    sys.stderr.write(f"tightwire {verb}: {error}\n")
    return exit_code


def _at_least(least: int, kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type for numbers of at least ``least``."""

    def from_text(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None
        if not number >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return number

    return from_text
