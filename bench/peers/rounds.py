"""All servers up, one at a time under load: the servers of a run, and their turns in random order, round by round."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from arms import Arm
from peer_process import PeerProcess, StartError, free_port
from turns import Load, TurnError, answers, bench, compare_answers, warm_up

from tightwire.bench.report.quiet import OthersWatch


@dataclass(kw_only=True)
class Peer:
    """One server of the run and what came of it. ``fault`` set: it is left out from then on, and the report says why."""

    arm: Arm
    process: PeerProcess | None = None
    fault: str | None = None
    answers: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.process.url if self.process else self.arm.url

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.arm.name,
            "numbers": self.arm.numbers,
            "command": " ".join(self.arm.command) or self.arm.url,
            "env": dict(self.arm.env),
            "ready_s": self.process.ready_s if self.process else None,
            "fault": self.fault,
            "answers": self.answers,
            "turns": self.turns,
        }


class Rounds:
    """The servers, from the first start to the last stop; use it as a context."""

    def __init__(self, arms: Sequence[Arm], load: Load, *, seed: int, folder: Path, start_s: float) -> None:
        self.peers = [Peer(arm=arm) for arm in arms]
        self._load = load
        self._seed = seed
        self._folder = folder
        self._start_s = start_s
        self._random = random.Random(f"{seed}/turns")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """All end together; a further Ctrl-C meanwhile would leave the rest of them running."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            processes = [peer.process for peer in self.peers if peer.process is not None]
            for process in processes:
                process.ask_to_stop()
            for process in processes:
                process.stop()
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def running(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.fault is None]

    def start(self) -> None:
        """One after the other, so that the time each takes to be ready is its own; then checked and warmed up."""
        reference: list[str] = []
        for peer in self.peers:
            say(f"starting {peer.arm.name}")
            try:
                if peer.arm.command:
                    self._start_process(peer)
                peer.answers = answers(peer.arm, peer.url)
                reference = reference or peer.answers
                compare_answers(reference, peer.answers)
                warm_up(peer.arm, peer.url, self._load)
            except (StartError, TurnError) as error:
                self._leave_out(peer, str(error))

    def _start_process(self, peer: Peer) -> None:
        port = free_port()
        log = self._folder / f"{''.join(c if c.isalnum() else '-' for c in peer.arm.name)}.log"
        peer.process = PeerProcess(peer.arm.on_port(port), peer.arm.env, port=port, log=log)
        peer.process.wait_ready(peer.arm.health, self._start_s)

    def take_turns(self, number: int) -> None:
        """Round ``number``: every server once, in random order, with the same prompts, which no other round has."""
        order = self.running
        self._random.shuffle(order)
        for peer in order:
            say(f"round {number}: {peer.arm.name}")
            try:
                peer.turns.append({"round": number, **self._turn(peer, number)})
            except TurnError as error:
                self._leave_out(peer, f"in round {number} {error}")

    def _turn(self, peer: Peer, number: int) -> dict[str, Any]:
        idle = [other for other in self.running if other is not peer and other.process]
        used = {other.arm.name: other.process.cpu_s() for other in idle if other.process}
        began = time.perf_counter()
        watch = OthersWatch([pid for each in self.running if each.process for pid in each.process.pids()])
        result = bench(peer.arm, peer.url, self._load, seed=self._seed + number, output=self._folder)
        took_s = time.perf_counter() - began
        cores = os.cpu_count() or 1
        shares = {
            other.arm.name: max(0.0, other.process.cpu_s() - used[other.arm.name]) / (cores * took_s)
            for other in idle
            if other.process
        }
        return {
            "loads": result["cells"],
            "wanted": {"prompt": self._load.input_len, "generated": self._load.output_len},
            "files": result["files"],
            "took_s": took_s,
            "idle_share": shares,
            "others_share": _share(watch),
        }

    def _leave_out(self, peer: Peer, why: str) -> None:
        tail = f"\n{peer.process.log_tail()}" if peer.process and peer.process.log_tail() not in why else ""
        peer.fault = why + tail
        say(f"{peer.arm.name} is left out: {peer.fault}")
        if peer.process is not None:
            peer.process.stop()


def _share(watch: OthersWatch) -> float | None:
    """Of all cores, what programs that are no part of this run used; None if a server's process ended meanwhile."""
    try:
        return watch.share()
    except OSError:
        return None


def plain_peers(peers: Iterable[Peer]) -> list[dict[str, Any]]:
    return [peer.plain() for peer in peers]


def plain_load(load: Load) -> dict[str, Any]:
    return asdict(load)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
