"""Passes a command's words through the parser of its verb; nothing is started or measured.

``train`` has --dry-run, without its simulated step, which refuses nothing and takes seconds.
"""

import argparse
from typing import Any, NoReturn

import pytest

from tightwire.__main__ import main
from tightwire.bench import cli
from tightwire.server.config import flags
from tightwire.training.estimate import memory, step


class _ParsedError(Exception):
    """The parser of a verb accepts the arguments; nothing was started."""


def _stop() -> NoReturn:
    raise _ParsedError


def parse(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """The parser of a verb accepts ``argv``, and its options fit each other; fails otherwise."""
    verb, *rest = argv
    if verb == "bench":
        load = cli.load
        monkeypatch.setattr(cli, "load", lambda entry: _stop() if entry.endswith("Bench") else load(entry))
        with pytest.raises(_ParsedError):
            main(argv)
        return
    if verb == "train":
        monkeypatch.setattr(step, "repeat", lambda *_, **__: [1.0])  # a product that tells the processor's speed
        monkeypatch.setattr(memory, "activation_bytes", lambda *_, **__: memory.Activations(0, 0))
        assert main(["train", *("pretrain-10m" if word == "my.yaml" else word for word in rest), "--dry-run"]) == 0
        return
    if verb == "serve":
        flags.parse(flags.make_parser("serve", "Serve."), rest)
        return
    original = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, *args: Any, **named: Any) -> NoReturn:
        _, unknown = original(self, *args, **named)
        assert not unknown, f"unknown: {unknown}"
        _stop()

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    with pytest.raises(_ParsedError):
        main(argv)
