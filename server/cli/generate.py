"""Runs ``tightwire generate``: checks the options, starts the ranks, then imports and runs what answers the prompt."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from tightwire.option import options_of
from tightwire.option_flags import add_flags, make_options
from tightwire.progress import START_STAGES, Progress, importing
from tightwire.server.cli.start import AnswerOptions, check_machine, interrupts_end_at_once, refuse, start_ranks
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.plan.setting import refuse_wrong_model

_GROUPS = ("model", "parallel", "engine", "weights", "timeouts")


def generate(argv: Sequence[str]) -> int:
    """``tightwire generate``: text on standard output, everything else on standard error; exit codes as ``serve``."""
    purpose = "Continue one prompt on the terminal, without a server."
    parser = make_parser("generate", purpose, _GROUPS, argument="PROMPT")
    add_flags(parser, options_of(AnswerOptions))
    config, args = parse(parser, argv, _GROUPS)
    refuse_serving_flags(parser, config)
    answer = make_options(AnswerOptions, parser, args)
    if answer.lora is not None:
        config = replace(config, adapters=AdapterOptions(lora=(f"lora={answer.lora}",)))
    with ExitStack() as stack:
        try:
            refuse_wrong_model(config)
            check_machine(config)
            ranks = start_ranks(config, stack)
        except ValueError as error:
            return refuse("generate", error)
        progress = Progress(config.parallel.num_ranks, START_STAGES)
        progress.stage("import", 0.0)
        with interrupts_end_at_once(), importing():
            from tightwire.server.cli import offline
        return offline.generate(config, ranks, progress, answer)
