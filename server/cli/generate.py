"""Runs ``tightwire generate``: checks the options, starts the ranks, then imports and runs what answers the prompt."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tightwire.server.cli.progress import START_STAGES, Progress
from tightwire.server.cli.start import check_machine, interrupts_end_at_once, refuse, start_ranks
from tightwire.server.config.flags import add_flags, make_options, make_parser, parse, refuse_serving_flags
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.config.option import option, options_of, require
from tightwire.server.plan.setting import refuse_wrong_model

_GROUPS = ("model", "parallel", "engine", "weights", "timeouts")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    """The flags of ``generate`` alone."""

    max_tokens: int = option(128, "tokens to add", metavar="N")
    temperature: float = option(0.0, "0: always the most likely token", metavar="T")
    chat: bool = option(False, "send PROMPT as a user's message, in the model's chat template")
    lora: str | None = option(None, "answer with this LoRA adapter, a folder that PEFT wrote", metavar="FOLDER")

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        require(self.lora != "", "lora", self.lora, "left out, or not empty")


def generate(argv: Sequence[str]) -> int:
    """``tightwire generate``: text on standard output, everything else on standard error; exit codes as ``serve``."""
    parser = make_parser(
        "generate", "Continue one prompt on the terminal, without a server.", _GROUPS, argument="PROMPT"
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; with --chat, a message")
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
        with interrupts_end_at_once():
            from tightwire.server.cli import offline
        try:
            return offline.generate(
                config,
                ranks,
                progress,
                args.prompt,
                max_tokens=answer.max_tokens,
                temperature=answer.temperature,
                chat=answer.chat,
            )
        except KeyboardInterrupt:
            return 130
