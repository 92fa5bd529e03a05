"""Runs ``tightwire serve``: checks the options, starts the ranks, then imports and runs the HTTP process."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from tightwire.model.checkpoint.header import has_copy
from tightwire.parent_death import clean_up_at_signals
from tightwire.progress import START_STAGES, Progress, importing
from tightwire.server.cli.start import check_machine, interrupts_end_at_once, refuse, say, start_ranks
from tightwire.server.config.flags import make_parser, parse
from tightwire.server.hosts.launcher import resolve_hosts
from tightwire.server.hosts.place import wait_for_place
from tightwire.server.http.listener import check_files, open_listener, remove_socket
from tightwire.server.plan.setting import refuse_wrong_model

# A launcher may name a host before the name has an address: Kubernetes adds a pod's name some seconds after its start.
_NAME_S = 120.0


@interrupts_end_at_once()
def serve(argv: Sequence[str]) -> int:
    """``tightwire serve``: exit code 0 after a signal, 1 if a rank or the network is lost, 2 if refused."""
    config, _ = parse(make_parser("serve", "Serve a model over the OpenAI HTTP API, split over rank processes."), argv)
    by_hand = config.hosts.master_addr is not None
    try:
        config, notes = resolve_hosts(config, os.environ)
        say(*notes)
        place = wait_for_place(config.hosts, 0.0 if by_hand else _NAME_S, say) if config.hosts.several else None
        if place is not None:
            say(place.describe())
        check_files(config.http)
        if place is None or place.node == 0 or has_copy(config.model.model):
            refuse_wrong_model(config)
        else:
            say(f"this host has no copy of {config.model.model}; node 0 will send it")
        check_machine(config)
        listener = open_listener(config.http)
    except ValueError as error:
        return refuse("serve", error)
    with listener, ExitStack() as stack:
        stack.callback(remove_socket, config.http)
        if config.http.uds is not None:  # a signal ends the process without the stack, until asyncio handles signals
            clean_up_at_signals(lambda: remove_socket(config.http))
        try:
            ranks = start_ranks(config, stack, place)
        except ValueError as error:
            return refuse("serve", error)
        num_shown = len(ranks.numbers) if place and place.node else config.parallel.num_ranks
        progress = Progress(num_shown, START_STAGES, verbose=config.http.log_level == "debug")
        progress.stage("import", 0.0, ranks.numbers[0])
        with importing():
            from tightwire.server.cli import http_process
        code = http_process.serve(config, listener, ranks, progress)
    if code != 2 or place is not None:
        # The interpreter's own end takes seconds on a busy machine, and aborts if a thread still opens the model.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
