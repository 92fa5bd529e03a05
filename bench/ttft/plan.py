"""What is measured in which order: cells, arms, and random blocks of them.

A block is one cell with every arm once, in random order, so that a machine that drifts does so for all arms alike; all
cells are in every round, in random order too, so a run that is cut short has something of each.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One contestant. ``name`` differs from ``algorithm`` when one is there twice, to be compared with itself.

    ``own``: the server's own, for which a request need not ask.
    """

    name: str
    algorithm: str
    own: bool
    lossless: bool
    error: float  # relative RMS error of one AllReduce; 0 when lossless

    @property
    def option(self) -> dict[str, str]:
        """What a request's ``tightwire`` field says to get this arm."""
        return {} if self.own else {"allreduce": self.algorithm}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    prompt_len: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt_len} prompt tokens, {self.concurrency} at a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One cell in one round, and the order in which the arms run."""

    round: int
    cell: Cell
    arms: tuple[Arm, ...]


def make_cells(prompt_lens: Sequence[int], concurrency: Sequence[int]) -> list[Cell]:
    return [Cell(prompt_len=length, concurrency=count) for length in prompt_lens for count in concurrency]


def arm_names(algorithms: Sequence[str]) -> list[str]:
    """A name for each; one that is there again gets a number, for comparing it with itself."""
    return [
        name if (times := algorithms[: place + 1].count(name)) == 1 else f"{name}#{times}"
        for place, name in enumerate(algorithms)
    ]


def make_blocks(cells: Sequence[Cell], arms: Sequence[Arm], repeats: int, seed: int) -> Iterator[Block]:
    """All blocks in the order in which they run; the same seed gives the same order."""
    source = random.Random(f"{seed}/blocks")
    for number in range(repeats):
        for cell in source.sample(list(cells), len(cells)):
            yield Block(round=number, cell=cell, arms=tuple(source.sample(list(arms), len(arms))))
