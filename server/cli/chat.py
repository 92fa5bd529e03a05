"""Holds a conversation with a running OpenAI-compatible server, in the terminal or from a pipe: ``tightwire chat``."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tightwire import remote
from tightwire.option import as_utf8, option, options_of
from tightwire.option_flags import add_flags, make_options
from tightwire.progress import Speed
from tightwire.remote import Conversation, RemoteError
from tightwire.server.cli.start import refuse, say
from tightwire.server.config.flags import parse_flags

_HELP = "/reset starts a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer\n"
# Escape sequences in a model's answer could rewrite the screen or the clipboard, so only text is printed.
_CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)], None)
_PRINTABLE = {code: to for code, to in _CONTROLS.items() if chr(code) not in "\n\t"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    url: str = option("http://127.0.0.1:8000", "the server", metavar="URL", parse=remote.parse_url)
    model: str | None = option(None, "the model (the first one the server lists)", parse=as_utf8)
    api_key: str | None = option(None, "sent as a Bearer token", metavar="KEY", parse=remote.parse_key)
    system: str | None = option(None, "a message that heads the conversation", metavar="TEXT", parse=as_utf8)
    temperature: float | None = option(0.2, "0: always the most likely token", metavar="T", least=0, most=2)
    max_tokens: int | None = option(None, "longest answer (the server's default)", least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if the server cannot be used; 2 for invalid options."""
    description = "Chat in the terminal with a running server."
    parser = argparse.ArgumentParser(prog="tightwire chat", description=description, epilog=_HELP)
    add_flags(parser, options_of(ChatOptions))
    given = make_options(ChatOptions, parser, parse_flags(parser, sys.argv[1:] if argv is None else argv))
    try:
        served = remote.connect(given.url, model=given.model, api_key=given.api_key)
        fields = {"temperature": given.temperature, "max_tokens": given.max_tokens}
        conversation = Conversation(remote=served, system=given.system, fields=fields)
        return _talk(conversation) if sys.stdin.isatty() else _answer_lines(conversation, sys.stdin)
    except RemoteError as error:
        return refuse("chat", error, exit_code=1)


def _talk(conversation: Conversation) -> int:
    """The interactive loop; shows errors and continues."""
    out = sys.stdout
    out.write(f"{conversation.remote.model} at {conversation.remote.base}\n{_HELP}\n")
    with _line_history():
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                out.write("\n")
                return 0
            except KeyboardInterrupt:
                out.write("\n")  # drops the typed line, as a shell does
                continue
            if line == "/exit":
                return 0
            if line == "/reset":
                conversation.turns.clear()
                out.write("(a new conversation)\n")
            elif line.startswith("/"):
                out.write(_HELP)
            elif line:
                _show_answer(conversation, line, out)


def _show_answer(conversation: Conversation, line: str, out: TextIO) -> None:
    # Closing the iterator after Ctrl-C also ends the request, so the server stops generating.
    answer, speed = conversation.answer(line), Speed()
    try:
        for part in answer:
            speed.count(1)
            out.write(part.translate(_PRINTABLE))
            out.flush()
        out.write("\n")
        out.flush()
        say(f"({speed.describe(conversation.num_tokens)})\n")
    except KeyboardInterrupt:
        out.write(" ...\n(stopped)\n\n")
    except RemoteError as error:
        out.write(f"\n({error})\n\n")
    finally:
        answer.close()


def _answer_lines(conversation: Conversation, lines: TextIO) -> int:
    """One turn per line, answers only; for pipes and scripts."""
    for line in lines:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                conversation.turns.clear()
            case text:
                for part in conversation.answer(text):
                    sys.stdout.write(part.translate(_PRINTABLE))
                    sys.stdout.flush()
                sys.stdout.write("\n")
    return 0


@contextmanager
def _line_history() -> Iterator[None]:
    """Line editing and a saved history, if the readline module exists."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tightwire" / "chat-history"
    with suppress(OSError):  # no history file yet
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):  # the home folder may be read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(1000)
            readline.write_history_file(path)
