"""Defines the options of ``tightwire bench train``."""

from dataclasses import dataclass

from tightwire.bench.options import OutputOptions, option, parse_names
from tightwire.bench.train.arms import ARMS, MODELS
from tightwire.comm.link.link import parse_link

_DTYPES = ("float32", "bfloat16")
_MAX_RANKS = 64


def _parse_unique(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(parse_names(text)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBenchOptions(OutputOptions):
    model: str = option("10m", f"{', '.join(MODELS)} parameters, or as for serve, such as random:path/config.json")
    nodes: int = option(2, "emulated nodes", metavar="N")
    ranks_per_node: int = option(2, "processes of each node, one thread each", metavar="N")
    links: tuple[str, ...] = option(
        ("50mbit", "200mbit", "1gbit"),
        "links between the nodes, emulated one after the other; needs root",
        metavar="RATE,RATE",
        parse=_parse_unique,
    )
    arms: tuple[str, ...] = option(
        ("zero3", "zero++", "hybrid", "dgc", "top-k", "ddp", "fsdp2"),
        f"ways to train: {', '.join(ARMS)}",
        metavar="NAME,NAME",
        parse=_parse_unique,
    )
    sequences: int = option(4, "sequences of each rank in a step", metavar="N")
    sequence_tokens: int = option(128, "tokens of a sequence", metavar="N")
    dtype: str = option("float32", "of weights and activations in forward and backward", choices=_DTYPES)
    steps: int = option(1, "steps of an arm in each round", metavar="N")
    repeats: int = option(3, "rounds, in each of which all arms take turns", metavar="N")
    seed: int = option(0, "of weights, tokens and the order of arms", metavar="N")
    timeout_s: float = option(120.0, "longest wait for a rank", metavar="S", flag="--timeout")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.arms if name not in ARMS]:
            raise ValueError(f"--arms: there is no {', '.join(map(repr, unknown))}; choose from {', '.join(ARMS)}")
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
        if self.dtype != "float32" and any(ARMS[name].peer == "ddp" for name in self.arms):
            raise ValueError(f"--dtype {self.dtype}: ddp computes in float32 only; leave it out of --arms")
        if not self.timeout_s > 0:
            raise ValueError(f"--timeout must be above 0, got {self.timeout_s}")
        for link in self.links:
            if parse_link(link).bytes_per_s is None:
                raise ValueError(f"--links: {link} limits no rate; write one such as 200mbit")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node
