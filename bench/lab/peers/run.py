"""``tightwire bench lab peers``: measures other servers beside `tightwire serve` on the same weights, prompts and machine.

README.md says how to install the peers and what a round is. A server that fails is reported and left out.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tightwire.bench.hosts import EmulatedHosts
from tightwire.bench.lab.peers import report
from tightwire.bench.lab.peers.arms import Arm, NotInstalledError, Setup, make_arm
from tightwire.bench.lab.peers.options import PeersOptions
from tightwire.bench.lab.peers.process import CHECK_PROMPTS, Load, bench_serve, compare_answers, greedy_answers
from tightwire.bench.report.page import Item, Text
from tightwire.bench.report.quiet import QUIET_SHARE, OthersWatch, describe_others, wait_for_quiet
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.bench.server_process import ServerFailedError, ServerProcess
from tightwire.kernels.cpu.library import has_pairs
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.open import open_checkpoint
from tightwire.training.start.export import export_folder
from tightwire.whole_folder import cache_folder


@dataclass(kw_only=True)
class Peer:
    """One server of the run. A server with a ``fault`` is left out from then on; the report gives the reason."""

    arm: Arm
    process: ServerProcess | None = None
    fault: str | None = None
    answers: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)  # one for each round

    @property
    def url(self) -> str:
        return self.process.url if self.process else self.arm.url

    @property
    def file_name(self) -> str:
        return "".join(char if char.isalnum() or char in ".-" else "-" for char in self.arm.name)

    def pids(self) -> list[int]:
        return self.process.pids() if self.process else []

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


class PeersBench(Bench[PeersOptions]):
    verb = "peers"
    of_lab = True
    metrics = report.METRICS
    columns = report.CSV_COLUMNS
    failures = ((ValueError, 2), (ModelError, 2))

    def __init__(self, options: PeersOptions) -> None:
        super().__init__(options)
        self._load = Load(
            concurrency=options.concurrency,
            num_requests=options.num_requests,
            input_len=options.input_len,
            output_len=options.output_len,
        )
        self._random = random.Random(f"{options.seed}/turns")
        self._peers: list[Peer] = []
        self._done = 0
        self._others = 0.0  # the largest share of the cores that other programs used in a round

    def measure(self) -> None:
        options = self.options
        with ExitStack() as stack:
            hosts = None
            if options.link is not None:
                hosts = stack.enter_context(EmulatedHosts(options.link, options.nnodes))
                self.facts["link"] = hosts.facts()
                stack.enter_context(hosts.visiting())
            self._measure_on(hosts)
        if self._others > QUIET_SHARE:
            self.note(describe_others(self._others))
        if not any(peer.turns for peer in self._peers):
            raise BenchFailedError("no server could be measured")

    def _measure_on(self, hosts: EmulatedHosts | None) -> None:
        options = self.options
        self._peers = self._make_peers(hosts)
        with tempfile.TemporaryDirectory() as scratch, _stopping(self._peers):
            folder, began = options.output or Path(scratch), time.perf_counter()
            wait_for_quiet(options.wait_for_quiet)
            self._start(folder)
            longest_s = 0.0
            while self._running and self._done < options.rounds:
                round_began = time.perf_counter()
                if round_began + longest_s >= began + options.time_limit:
                    break
                watch = OthersWatch([pid for peer in self._running for pid in peer.pids()])
                self._run_round(self._done + 1, folder)
                with suppress(OSError):  # a server's process ended in the meantime
                    self._others = max(self._others, watch.share())
                longest_s = max(longest_s, time.perf_counter() - round_began)
                self._done += 1
                self.keep()

    def cells(self) -> list[dict[str, Any]]:
        return report.summarize([peer.plain() for peer in self._peers], self.options.seed)

    def result(self, error: str | None) -> dict[str, Any]:
        self.facts |= {
            "nnodes": self.options.nnodes,
            "load": asdict(self._load),
            "rounds": self._done,
            "rounds_asked": self.options.rounds,
            "seed": self.options.seed,
            "others_share": self._others,
            "check_prompts": list(CHECK_PROMPTS),
            "peers": [peer.plain() for peer in self._peers],
        }
        return super().result(error)

    def show_end(self, result: Mapping[str, Any]) -> None:
        if result["peers"]:
            self.print_table(report.figures(result))
            for text in report.doubts(result):
                self.note(text)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        lengths = f"{self._load.input_len} prompt tokens, {self._load.output_len} generated"
        lead = f"{lengths}; {result['rounds']} rounds of random order; all servers up, one at a time under load."
        lead += f" {self.options.nnodes} hosts at {self.options.link} each." if self.options.link else ""
        return "Servers side by side, same weights, one machine", lead

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        missing = report.doubts(result)
        texts: list[Item] = [Text(title="What is missing", lines=missing)] if missing else []
        return [*texts, report.figures(result)]

    @property
    def _running(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.fault is None]

    def _make_peers(self, hosts: EmulatedHosts | None) -> list[Peer]:
        """Servers whose programs are missing have a fault from the beginning."""
        peers: list[Peer] = []
        setup: Setup | None = None
        for word in self.options.servers:
            name, equals, url = word.partition("=")
            if equals and name and url:
                peers.append(Peer(arm=Arm(name=name, numbers="its own", url=url.rstrip("/"))))
                continue
            setup = setup or _make_setup(self.options, hosts)
            try:
                peers.append(Peer(arm=make_arm(word, setup)))
            except NotInstalledError as error:
                self.say(f"{word} is left out: {error}")
                peers.append(Peer(arm=Arm(name=word, numbers="-"), fault=str(error)))
        names = [peer.arm.name for peer in peers]
        if len(set(names)) < len(names):
            raise ValueError(f"--servers must name each server once, got {', '.join(names)}")
        if setup and any(str(setup.weights) in word for peer in peers for word in peer.arm.command):
            _convert(setup)
        return sorted(peers, key=lambda peer: peer.fault is not None)

    def _start(self, folder: Path) -> None:
        """Start one server after the other, so that each start-up time is its own; check its answers and warm it up."""
        reference: list[str] = []
        for peer in self._running:
            self.say(f"starting {peer.arm.name}")
            try:
                if peer.arm.command:
                    log = folder / f"{peer.file_name}.log"
                    peer.process = ServerProcess(peer.arm.command, peer.arm.env, log=log, others=peer.arm.others)
                    peer.process.wait_ready(peer.arm.health, self.options.start_timeout)
                peer.answers = greedy_answers(peer.url, peer.arm.model)
                reference = reference or peer.answers
                compare_answers(reference, peer.answers)
                # Every concurrency once with few tokens, so that first-use work is not measured.
                warm_up = replace(self._load, num_requests=self._load.concurrency, output_len=4)
                bench_serve(peer.url, warm_up, seed=0, flags=peer.arm.bench_flags)
            except ServerFailedError as error:
                self._leave_out(peer, str(error))

    def _run_round(self, number: int, folder: Path) -> None:
        """Put the load on every server once, in random order, with the same prompts but for their first words."""
        order, options = self._running, self.options
        self._random.shuffle(order)
        for peer in order:
            self.say(f"round {number}: {peer.arm.name}")
            label, flags = peer.file_name, peer.arm.bench_flags
            try:
                result = bench_serve(
                    peer.url, self._load, seed=options.seed + number, output=folder, label=label, flags=flags
                )
            except ServerFailedError as error:
                self._leave_out(peer, f"in round {number} {error}")
            else:
                peer.turns.append({"round": number, "loads": result["cells"], "files": result["files"]})

    def _leave_out(self, peer: Peer, why: str) -> None:
        tail = f"\n{peer.process.log_tail()}" if peer.process and peer.process.log_tail() not in why else ""
        peer.fault = why + tail
        self.say(f"{peer.arm.name} is left out: {peer.fault}")
        if peer.process is not None:
            peer.process.stop()


@contextmanager
def _stopping(peers: Sequence[Peer]) -> Iterator[None]:
    """Stop all servers at the end. Ctrl-C is ignored meanwhile, because it would leave some of them running."""
    try:
        yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes = [peer.process for peer in peers if peer.process is not None]
        for process in processes:
            process.begin_stop()
        for process in processes:
            process.stop()
        signal.signal(signal.SIGINT, before)


def _make_setup(options: PeersOptions, hosts: EmulatedHosts | None) -> Setup:
    checkpoint = open_checkpoint(options.model)
    path = checkpoint.path
    if path is None or path.suffix != ".gguf":
        raise ValueError(
            f"--model must have a .gguf file, because the weights of all servers are made from it, got {options.model}"
        )
    peers = options.peers or cache_folder() / "peers"
    return Setup(
        torch_dtype="bfloat16" if has_pairs() else "float32",
        model=options.model,
        gguf=path,
        weights=(options.weights or peers / "weights" / path.stem).absolute(),
        peers=peers,
        num_threads=len(os.sched_getaffinity(0)),
        num_layers=checkpoint.config.num_layers,
        hosts=hosts,
    )


def _convert(setup: Setup) -> None:
    """Write the folder that vLLM and transformers read, in bfloat16, unless it exists.

    `transformers serve` has no ``ignore_eos``, so the folder names no end token: every answer runs to its full length.
    """
    folder = setup.weights / "hf"
    generation = folder / "generation_config.json"  # written last
    if generation.exists():
        return
    sys.stderr.write(f"converting {setup.gguf.name} for the peers, in {setup.weights}\n")
    checkpoint, dtype = open_checkpoint(setup.model), torch.bfloat16
    reader = checkpoint.reader()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in expected_tensors(checkpoint.config):
            tensor = torch.empty(shape, dtype=dtype)
            reader.read_into(tensor, name, rows=range(shape[0]))
            yield name, tensor

    if error := export_folder(folder, tensors(), checkpoint.config, checkpoint.tokenizer(), dtype=dtype, writes=True):
        raise ValueError(f"cannot convert the weights for the peers: {error}")
    generation.write_text("{}\n")
