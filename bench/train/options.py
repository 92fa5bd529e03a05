"""Defines and checks the options of ``tightwire bench train`` and parses its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tightwire.bench.report.label import check_label
from tightwire.bench.train.arms import ARMS, parse_arms
from tightwire.bench.train.models import MODELS
from tightwire.comm.link.link import parse_link

DTYPES = ("float32", "bfloat16")
_ARMS = "zero3,zero++,hybrid,dgc,top-k,ddp,fsdp2"
_LINKS = "50mbit,200mbit,1gbit"
_MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBenchOptions:
    model: str = "10m"
    nodes: int = 2
    ranks_per_node: int = 2
    links: tuple[str, ...] = tuple(_LINKS.split(","))
    arms: tuple[str, ...] = tuple(_ARMS.split(","))
    sequences: int = 4  # per rank and step
    sequence_tokens: int = 128
    dtype: str = "float32"
    steps: int = 1  # steps of an arm per turn
    repeats: int = 3  # turns of each arm
    seed: int = 0
    timeout_s: float = 120.0
    output: Path | None = None
    label: str = "train"

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--nodes", self.nodes, 2),
            ("--ranks-per-node", self.ranks_per_node, 1),
            ("--sequences", self.sequences, 1),
            ("--sequence-tokens", self.sequence_tokens, 2),
            ("--steps", self.steps, 1),
            ("--repeats", self.repeats, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} must be at least {least}, got {value}")
        if self.world_size > _MAX_RANKS:
            raise ValueError(f"{self.nodes} nodes of {self.ranks_per_node} ranks are more than {_MAX_RANKS} ranks")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype takes {', '.join(DTYPES)}, got {self.dtype}")
        if self.dtype != "float32" and any(ARMS[name].peer == "ddp" for name in self.arms):
            raise ValueError(f"--dtype {self.dtype}: ddp computes in float32 only; leave it out of --arms")
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")
        for link in self.links:
            if parse_link(link).bytes_per_s is None:
                raise ValueError(f"--links: {link} limits no rate; write one such as 200mbit")
        check_label(self.label)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def parse_options(argv: Sequence[str]) -> TrainBenchOptions:
    """Parse the command line. Prints the error and exits with status 2 if it is wrong."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    quick = given.pop("quick")
    try:
        given = {name: value for name, value in given.items() if value is not None}
        if quick:
            given = {"links": "200mbit", "arms": "zero3,zero++,fsdp2", "repeats": 2, **given}
        if "arms" in given:
            given["arms"] = parse_arms(given["arms"])
        if "links" in given:
            given["links"] = tuple(dict.fromkeys(given["links"].split(",")))
        return TrainBenchOptions(**given)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    plain = TrainBenchOptions()
    parser = argparse.ArgumentParser(
        prog="tightwire bench train",
        description="Real training steps of a Llama with random weights between emulated nodes: time, bytes between nodes, "
        "communication that nothing hid, memory and losses, by link and way of sharing the model out, beside torch's own "
        "data parallelism, and what a calibrated model predicts. Links need root. The last line of stdout is one JSON "
        "object; exit code 1: something that was checked is wrong.",
    )
    add = parser.add_argument
    add(
        "--model",
        help=f"{', '.join(MODELS)} (parameters), or as for serve, such as random:path/config.json ({plain.model})",
    )
    add("--nodes", type=int, metavar="N", help=f"({plain.nodes})")
    add("--ranks-per-node", type=int, metavar="N", help=f"({plain.ranks_per_node})")
    add("--links", metavar="RATE,RATE", help=f"between nodes ({_LINKS})")
    add("--arms", metavar="NAME,NAME", help=f"none, zero1, zero2, zero3-flat, ... as well ({_ARMS})")
    add("--sequences", type=int, metavar="N", help=f"of each rank in a step ({plain.sequences})")
    add("--sequence-tokens", type=int, metavar="N", help=f"({plain.sequence_tokens})")
    add("--dtype", choices=DTYPES, help=f"that weights compute in ({plain.dtype})")
    add("--steps", type=int, metavar="N", help=f"of one arm before another has its turn ({plain.steps})")
    add("--repeats", type=int, metavar="N", help=f"turns of each arm ({plain.repeats})")
    add("--quick", action="store_true", help="one link, three arms, two turns, where these are not given")
    add("--seed", type=int, metavar="N", help=f"of weights, tokens and turns ({plain.seed})")
    add("--timeout", type=float, dest="timeout_s", metavar="S", help=f"longest wait for a rank ({plain.timeout_s:g})")
    add("--output", type=Path, metavar="DIR", help="keep JSON (raw samples included), CSV and an HTML page there")
    add("--label", metavar="NAME", help=f"beginning of those files' names ({plain.label})")
    return parser
