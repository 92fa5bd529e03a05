"""The options that benches share. Those of each bench are declared with ``tightwire.option``, in its file ``options``.

A ValueError of a field's ``parse`` or of ``__post_init__`` ends the program with exit code 2 and its message.
"""

import argparse
from collections.abc import Sequence
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tightwire.bench.report.result_files import check_label
from tightwire.comm.all_reduce.names import split_name
from tightwire.comm.link.link import Link
from tightwire.comm.policy.tune_file import PEER_BLOCKS
from tightwire.model.checkpoint.header import check_name
from tightwire.option import option, options_of
from tightwire.option_flags import add_flags, make_options
from tightwire.server.config.flags import parse_flags
from tightwire.sizes import parse_bytes

TRANSPORTS = ("auto", "shared-memory", "sockets", "process-group", "peer-memory")
LAST_LINE = "In a pipe or a file the last line of stdout is one JSON object."


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """The options of every bench; its own options class inherits them, in a file that imports no torch."""

    description: ClassVar[str] = ""  # for --help
    output: Path | None = option(None, "write the result here: JSON with raw samples, CSV, HTML page", metavar="DIR")
    label: str | None = option(
        None, "beginning of the names of those files (default: the bench's name)", metavar="NAME", parse=check_label
    )
    json: bool = option(False, "end with one JSON object on a line also on a terminal, as in a pipe or a file")

    @classmethod
    def from_argv(cls, argv: Sequence[str], *, verb: str) -> Self:
        """The options on a command line. Invalid ones print the reason and exit with code 2."""
        parser = argparse.ArgumentParser(
            prog=f"tightwire bench {verb}", description=f"{cls.description} {LAST_LINE}", allow_abbrev=False
        )
        add_flags(parser, cls.fields())
        return make_options(cls, parser, parse_flags(parser, argv))

    @classmethod
    def fields(cls) -> dict[str, Field[Any]]:
        """The options by name: those of one bench first, then those of every bench."""
        common = options_of(OutputOptions)
        return {name: own for name, own in options_of(cls).items() if name not in common} | common


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The number of ranks and their connection; raises ValueError for values that do not fit together."""

    ranks: int = 2
    nodes: int | None = None  # None: 1, or with a link one node for each rank
    device: str = "cpu"
    transport: str = "auto"
    link: Link | None = None
    timeout_s: float = 60.0
    peer_blocks: int = PEER_BLOCKS  # of a kernel that sums over peer memory

    def __post_init__(self) -> None:
        if self.nodes is not None and (self.nodes < 1 or self.ranks % self.nodes):
            raise ValueError(f"--nodes must divide the {self.ranks} ranks evenly, got {self.nodes}")
        if self.link is not None and self.num_nodes < 2:
            raise ValueError("--link is between nodes, so --nodes must be at least 2")
        if self.link is not None and (self.transport == "shared-memory" or self.device != "cpu"):
            raise ValueError("--link connects CPU processes by sockets; give --transport sockets or process-group")
        if self.device != {"peer-memory": "cuda", "shared-memory": "cpu", "sockets": "cpu"}.get(
            self.transport, self.device
        ):
            raise ValueError(f"--transport {self.transport} is not for --device {self.device}")

    @property
    def num_nodes(self) -> int:
        return self.nodes or (1 if self.link is None else self.ranks)

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.num_nodes


def known_model(name: str) -> str:
    """``name``, unless it is that of no model."""
    check_name(name)
    return name


def known_all_reduce(name: str) -> str:
    """``name``, unless it is the name of no AllReduce."""
    split_name(name)
    return name


def parse_sizes(text: str) -> tuple[int, ...]:
    """``8KiB,1MiB`` in bytes, sorted, each once."""
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
