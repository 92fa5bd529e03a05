"""Keeps all servers of a run up and puts load on one at a time, in random order, round by round."""

import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tightwire.bench.peers.arms import Arm
from tightwire.bench.peers.load import Load, LoadError, answers, bench, compare_answers, file_name, warm_up
from tightwire.bench.peers.process import PeerProcess, StartError, free_port
from tightwire.bench.report.quiet import OthersWatch


@dataclass(kw_only=True)
class Peer:
    """One server of the run and its turns. A server with a ``fault`` is left out from then on; the report says why."""

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
    """The servers from the first start to the last stop; use it as a context."""

    def __init__(self, arms: Sequence[Arm], load: Load, *, seed: int, folder: Path, start_s: float) -> None:
        self.peers = [Peer(arm=arm) for arm in arms]
        self._load, self._seed, self._folder, self._start_s = load, seed, folder, start_s
        self._random = random.Random(f"{seed}/turns")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all servers at once. Ctrl-C is ignored meanwhile, because it would leave some of them running."""
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
        """Start one server after the other, so that each start-up time is its own; check its answers and warm it up."""
        reference: list[str] = []
        for peer in self.peers:
            say(f"starting {peer.arm.name}")
            try:
                if peer.arm.command:
                    port = free_port()
                    log = self._folder / f"{file_name(peer.arm)}.log"
                    peer.process = PeerProcess(peer.arm.on_port(port), peer.arm.env, port=port, log=log)
                    peer.process.wait_ready(peer.arm.health, self._start_s)
                peer.answers = answers(peer.arm, peer.url)
                reference = reference or peer.answers
                compare_answers(reference, peer.answers)
                warm_up(peer.arm, peer.url, self._load)
            except (StartError, LoadError) as error:
                self._leave_out(peer, str(error))

    def take_turns(self, number: int) -> None:
        """Give every server one turn, in random order, with the same prompts, which no other round has."""
        order = self.running
        self._random.shuffle(order)
        for peer in order:
            say(f"round {number}: {peer.arm.name}")
            try:
                peer.turns.append({"round": number, **self._turn(peer, number)})
            except LoadError as error:
                self._leave_out(peer, f"in round {number} {error}")

    def _turn(self, peer: Peer, number: int) -> dict[str, Any]:
        processes = {each.arm.name: each.process for each in self.running if each.process}
        began = time.perf_counter()
        watch = OthersWatch([pid for process in processes.values() for pid in process.pids()])
        # Everything but the server under load: programs outside of the run, and the idle servers.
        not_loaded = OthersWatch(processes[peer.arm.name].pids() if peer.process else [])
        result = bench(peer.arm, peer.url, self._load, seed=self._seed + number, output=self._folder)
        others, with_idle = _share(watch), _share(not_loaded)
        return {
            "loads": result["cells"],
            "wanted": {"prompt": self._load.input_len, "generated": self._load.output_len},
            "files": result["files"],
            "took_s": time.perf_counter() - began,
            "others_share": others,
            "idle_share": None if others is None or with_idle is None else max(0.0, with_idle - others),
        }

    def _leave_out(self, peer: Peer, why: str) -> None:
        tail = f"\n{peer.process.log_tail()}" if peer.process and peer.process.log_tail() not in why else ""
        peer.fault = why + tail
        say(f"{peer.arm.name} is left out: {peer.fault}")
        if peer.process is not None:
            peer.process.stop()


def _share(watch: OthersWatch) -> float | None:
    """The share of all cores that others used; None if a server's process ended in the meantime."""
    try:
        return watch.share()
    except OSError:
        return None


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
