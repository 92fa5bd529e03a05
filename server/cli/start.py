"""Starts ranks for ``serve`` and ``generate``, before the verb imports anything heavy. Imports no torch."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import open_wire
from tightwire.kernels.cpu.library import available
from tightwire.option import REQUIRED, as_utf8, option, require
from tightwire.progress import Progress
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.place import HostPlace, NotNowError
from tightwire.server.plan.setting import refuse_early

if TYPE_CHECKING:
    from tightwire.server.ranks.processes import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerOptions:
    prompt: str = option(
        REQUIRED, "the text to continue; with --chat, a message", metavar="PROMPT", flag="prompt", parse=as_utf8
    )
    max_tokens: int = option(128, "tokens to add", least=1)
    temperature: float = option(0.0, "0: always the most likely token", metavar="T", least=0, most=2)
    chat: bool = option(False, "send PROMPT as a user's message, in the model's chat template")
    lora: str | None = option(None, "answer with this LoRA adapter, a folder that PEFT wrote", metavar="FOLDER")

    def __post_init__(self) -> None:
        require(self.lora != "", "lora", self.lora, "left out, or not empty")


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process silently; during imports it may print a traceback or be lost. Main thread only."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def check_machine(config: ServeConfig) -> None:
    """Load or compile the kernels, and refuse with a ValueError what this machine cannot do. No thread is left running."""
    progress = Progress()
    progress.stage("loading the CPU kernels", 0.0)
    available()
    progress.close()
    refuse_early(config)


def start_ranks(config: ServeConfig, stack: ExitStack, place: HostPlace | None = None) -> "Ranks":
    """Start the wire between the ranks, if any, then the ranks. ValueError: this machine cannot create the wire."""
    from tightwire.server.ranks.processes import Ranks  # asyncio and zmq: `--help` does without

    options, wire = config.parallel, None
    if options.link is not None:
        link, num, emulation = parse_link(options.link), options.wire_nodes, options.link_emulation
        opened = open_wire(link, num_nodes=num, ranks_per_node=options.tp // num, emulation=emulation)
        wire = stack.enter_context(opened)
    ranks = Ranks(
        options.num_ranks,
        num_nodes=options.nodes,
        num_replicas=options.dp,
        num_stages=1 if options.layout == "tensor" else options.num_stages,
        shares_weights=config.weights.weights in ("auto", "partition"),
        wire=wire,
        place=place,
    )
    return stack.enter_context(ranks)


def say(*lines: str) -> None:
    sys.stderr.writelines(f"{line}\n" for line in lines)


def refuse(verb: str, error: Exception, exit_code: int = 2) -> int:
    say(f"tightwire {verb}: {error}")
    return 1 if isinstance(error, NotNowError) else exit_code
