"""``tightwire bench peers``: measures other servers beside `tightwire serve` on the same weights, prompts and machine.

It starts all servers, checks their answers, then puts the same load on one after the other, in random order, round by
round, with `tightwire bench serve`. A server that does not start, answers wrongly or fails is reported and left out.
README.md says how to install the peers.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.options import OutputOptions, option, parse_integers, parse_names, parse_options
from tightwire.bench.peers import report
from tightwire.bench.peers.arms import ARMS, DEFAULT_ARMS, Arm, NotInstalled, Setup, make_arm, running_arm
from tightwire.bench.peers.load import CHECK_PROMPTS, Load
from tightwire.bench.peers.rounds import Peer, Rounds, say
from tightwire.bench.report.html import Section
from tightwire.bench.report.quiet import wait_for_quiet
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.model.checkpoint.catalog import cache_folder
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.open import open_checkpoint

_CONVERT = Path(__file__).resolve().with_name("convert_weights.py")
_QUIET = 0.1  # share of the cores that others may use


@dataclass(frozen=True, kw_only=True, slots=True)
class PeersOptions(OutputOptions):
    servers: tuple[str, ...] = option(
        tuple(DEFAULT_ARMS.split(",")),
        f"of {', '.join(ARMS)}; also tightwire-tpN:ALGORITHM, and NAME=URL of a running server; the first one is the baseline",
        metavar="A,B",
        parse=parse_names,
    )
    peers: Path | None = option(None, "where install.sh put the peers (the cache folder)", metavar="DIR")
    weights: Path | None = option(
        None, "where the peers' forms of the weights are kept (with the peers)", metavar="DIR"
    )
    model: str = option("smollm2-135m", "a name or a .gguf file")
    rounds: int = option(5, "turns of each server; below 5 there is no verdict", metavar="N")
    concurrency: tuple[int, ...] = option((1, 8, 32), "requests in flight", metavar="N,N", parse=parse_integers)
    num_requests: tuple[int, ...] = option(
        (3, 8, 32), "in a turn, for each of --concurrency", metavar="N,N", parse=parse_integers
    )
    input_len: int = option(128, "prompt tokens", metavar="N")
    output_len: int = option(32, "tokens to generate", metavar="N")
    seed: int = option(1, "of prompts and of the order of turns", metavar="N")
    time_limit: float = option(math.inf, "start no round that would end later", metavar="S")
    start_timeout: float = option(900.0, "longest start of a server", metavar="S")
    wait_for_quiet: float = option(0.0, "longest wait for other programs to finish", metavar="S")

    def __post_init__(self) -> None:
        if len(self.num_requests) != len(self.concurrency) or min([*self.num_requests, *self.concurrency]) < 1:
            raise ValueError(
                f"--num-requests takes one number above 0 for each of the {len(self.concurrency)} of --concurrency, "
                f"got {','.join(map(str, self.num_requests))}"
            )
        if not self.time_limit > 0:
            raise ValueError(f"--time-limit must be above 0 s, got {self.time_limit:g}")
        if self.rounds < 1:
            raise ValueError(f"--rounds must be at least 1, got {self.rounds}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when no server could be measured, 2 for bad options, 130 after Ctrl-C (measured rounds are kept)."""
    options = parse_options(
        PeersOptions,
        sys.argv[1:] if argv is None else argv,
        verb="peers",
        description="Compare servers on the same weights, in turns under the same load.",
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server may outlive this process
    return PeersBench(options).run()


class PeersBench(Bench):
    verb = "peers"
    metrics = report.METRICS
    failures = ((ValueError, 2), (ModelError, 2))

    def __init__(self, options: PeersOptions) -> None:
        super().__init__(options)
        self._options = options
        self._load = Load(
            concurrency=options.concurrency,
            num_requests=options.num_requests,
            input_len=options.input_len,
            output_len=options.output_len,
        )
        self._missing: list[Peer] = []
        self._rounds: Rounds | None = None
        self._done = 0

    def measure(self) -> None:
        options = self._options
        arms = self._arms()
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.output or Path(scratch)
            self._rounds = Rounds(arms, self._load, seed=options.seed, folder=folder, start_s=options.start_timeout)
            with self._rounds as rounds:
                self._measure(rounds)

    def _measure(self, rounds: Rounds) -> None:
        options, began = self._options, time.perf_counter()
        wait_for_quiet(_QUIET, options.wait_for_quiet)
        rounds.start()
        longest_s = 0.0
        while rounds.running and self._done < options.rounds:
            round_began = time.perf_counter()
            if round_began + longest_s >= began + options.time_limit:
                break
            rounds.take_turns(self._done + 1)
            longest_s = max(longest_s, time.perf_counter() - round_began)
            self._done += 1
            self.keep()
        if not any(peer.turns for peer in rounds.peers):
            raise BenchFailedError("no server could be measured")

    def cells(self) -> list[dict[str, Any]]:
        return report.summarize([peer.plain() for peer in self._peers()], self._options.seed)

    def _peers(self) -> list[Peer]:
        return [*(self._rounds.peers if self._rounds else []), *self._missing]

    def result(self, error: str | None) -> dict[str, Any]:
        self.facts = {
            "load": asdict(self._load),
            "rounds": self._done,
            "rounds_asked": self._options.rounds,
            "seed": self._options.seed,
            "check_prompts": list(CHECK_PROMPTS),
            "peers": [peer.plain() for peer in self._peers()],
        }
        return super().result(error)

    def show_end(self, result: Mapping[str, Any]) -> None:
        if result["peers"]:
            sys.stdout.write(report.markdown(result) + "\n")

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        lead = (
            f"{self._load.input_len} prompt tokens, {self._load.output_len} generated; {result['rounds']} rounds of random order; "
            "all servers up, one at a time under load."
        )
        return "Servers side by side, same weights, one machine", lead

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        doubts = report.doubts(result)
        warnings = [Section(title="Reasons to doubt the figures", words=doubts, wide=True)] if doubts else []
        return [*warnings, *report.make_sections(result)]

    def _arms(self) -> list[Arm]:
        """The servers that can be measured; those whose programs are missing go to ``_missing``."""
        arms: list[Arm] = []
        setup: Setup | None = None
        for word in self._options.servers:
            if (running := running_arm(word)) is not None:
                arms.append(running)
                continue
            setup = setup or _make_setup(self._options)
            try:
                arms.append(make_arm(word, setup))
            except NotInstalled as error:
                say(f"{word} is left out: {error}")
                self._missing.append(Peer(arm=Arm(name=word, numbers="-"), fault=str(error)))
        names = [arm.name for arm in arms]
        if len(set(names)) < len(names):
            raise ValueError(f"--servers must name each server once, got {', '.join(names)}")
        if setup and any(str(setup.weights) in word for arm in arms for word in arm.command):
            _convert(setup)
        return arms


def _make_setup(options: PeersOptions) -> Setup:
    path = open_checkpoint(options.model).path
    if path is None or path.suffix != ".gguf":
        raise ValueError(
            f"--model must have a .gguf file, because the weights of all servers are made from it, got {options.model}"
        )
    peers = options.peers or cache_folder() / "peers"
    return Setup(
        model=options.model,
        gguf=path,
        weights=(options.weights or peers / "weights" / path.stem).absolute(),
        peers=peers,
        num_threads=len(os.sched_getaffinity(0)),
    )


def _convert(setup: Setup) -> None:
    """Make the peers' forms of the weights unless they exist."""
    if all((setup.weights / name).exists() for name in ("hf", "f16.gguf", "bf16.gguf")):
        return
    say(f"converting {setup.gguf.name} for the peers, in {setup.weights}")
    python = setup.peers / "transformers" / "bin" / "python"
    try:
        subprocess.run([str(python), str(_CONVERT), str(setup.gguf), str(setup.weights)], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"cannot convert the weights for the peers ({error}); this needs the transformers peer: "
            f"bench/peers/install.sh {setup.peers} transformers"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
