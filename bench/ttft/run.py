"""The measurement itself, from a server that is ready: warm up and prove, then random blocks, then check answers."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx

from tightwire.bench.client import BenchClient
from tightwire.bench.text import english_text
from tightwire.bench.ttft.answers import Agreement, AnswerCheck
from tightwire.bench.ttft.bound import WireUse, wire_use
from tightwire.bench.ttft.facts import Facts
from tightwire.bench.ttft.meter import Entry, Meter
from tightwire.bench.ttft.options import TtftOptions
from tightwire.bench.ttft.plan import Arm, Block, Cell, arm_names, make_blocks, make_cells
from tightwire.bench.ttft.prompts import PromptMaker
from tightwire.bench.ttft.proof import ArmPolicy, prompt_sums
from tightwire.bench.ttft.summary import Measured, whole_blocks
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.server.cli.remote import Remote

_TIMEOUT_S = 1800.0  # of one request: a long prompt over a slow wire takes minutes
_TRACE_TRIES = 3
_BODY = {"temperature": 0, "ignore_eos": True}


class WrongAnswerError(RuntimeError):
    """Something else ran than was asked for, or it answered wrongly."""


class Run:
    """Filled while it runs, so that a run that is cut short keeps what it has.

    Args:
        told: called with what runs now, and with how many entries of how many are done.
        expected: called once with how many seconds the blocks will take, when all has warmed up.
        kept: called whenever a block is whole.
    """

    def __init__(
        self,
        options: TtftOptions,
        facts: Facts,
        *,
        told: Callable[[str, int, int], None],
        expected: Callable[[float], None],
        kept: Callable[[], None],
    ) -> None:
        self._options, self._facts, self._told, self._kept = options, facts, told, kept
        self._expected, self._expected_s = expected, 0.0
        self._cells = make_cells(options.prompt_lens, options.concurrency)
        self._arms: list[Arm] = []
        self._policies: dict[str, ArmPolicy] = {}
        self._entries: list[Entry] = []
        self._agreements: list[Agreement] = []
        self._uses: dict[tuple[Cell, str], WireUse] = {}
        self._done = 0
        self.comm: dict[str, Any] = {}  # GET /comm, before anything was asked
        self.traces: list[dict[str, Any]] = []  # of AllReduces by arm and message size, seconds on rank 0

    @property
    def num_entries(self) -> int:
        """Turns of arms, warm-ups and checks included."""
        return len(self._cells) * len(self._options.algorithms) * (2 + self._options.repeats + self._options.answers)

    def measured(self) -> Measured | None:
        """What there is; None before the first block is whole."""
        entries = whole_blocks(self._entries, len(self._options.algorithms))
        if not entries:
            return None
        return Measured(
            cells=self._cells,
            arms=self._arms,
            baseline=self._baseline,
            entries=entries,
            agreements=self._agreements,
            link=self.comm.get("link"),
            overlap=bool(self.comm.get("overlap")),
            uses=self._uses,
            seed=self._options.config.model.seed,
        )

    async def measure(self, remote: Remote) -> None:
        """Everything, in order.

        Raises:
            WrongAnswerError: a proof or an answer is wrong.
            RequestFailedError, RemoteError: the server failed.
            ValueError: prompts of these lengths cannot be had.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(BenchClient(remote, timeout_s=_TIMEOUT_S, extra_body=_BODY))
            http = await stack.enter_async_context(
                httpx.AsyncClient(headers=dict(remote.headers), timeout=_TIMEOUT_S, trust_env=remote.trust_env)
            )
            meter = Meter(client, http, remote, output_len=self._options.output_len)
            self.comm = await meter.comm()
            self._meet()
            prompts = PromptMaker(http, remote, seed=self._options.config.model.seed)
            self._tell("cutting prompts out of a text")
            await prompts.open(english_text())
            for cell in self._cells:
                for arm in self._arms:
                    await self._warm_up(meter, prompts, cell, arm)
            self._expected(self._expected_s)
            for block in make_blocks(self._cells, self._arms, self._options.repeats, self._options.config.model.seed):
                await self._block(meter, prompts, block)
                self._kept()
            await self._check_answers(AnswerCheck(http, remote, self._reference))
            self._kept()

    @property
    def _baseline(self) -> Arm:
        return next(arm for arm in self._arms if arm.algorithm == self._options.baseline_name)

    @property
    def _reference(self) -> Arm:
        """What answers are compared with."""
        lossless = (arm for arm in self._arms if arm.lossless)
        return self._baseline if self._baseline.lossless else next(lossless, self._baseline)

    def _meet(self) -> None:
        """Make the arms from what the server says of them."""
        extra, own = self.comm["extra"], self._options.baseline_name
        for name, algorithm in zip(arm_names(self._options.algorithms), self._options.algorithms, strict=True):
            policy = ArmPolicy(self.comm["choices"] if algorithm == own else extra[algorithm])
            used = policy.algorithms("prefill", "o_proj", "down_proj")
            self._policies[name] = policy
            self._arms.append(
                Arm(
                    name=name,
                    algorithm=algorithm,
                    own=algorithm == own,
                    lossless=all(parse_all_reduce(each).lossless for each in used),
                    error=max(self._facts.chooser.error(each) for each in used),
                )
            )

    async def _warm_up(self, meter: Meter, prompts: PromptMaker, cell: Cell, arm: Arm) -> None:
        """Twice, not counted: once to warm up, once with every message of every rank compared with its formula."""
        self._tell(f"warming up {arm.name}, {cell}")
        entry = Entry(cell=cell, arm=arm, round=-2, place=0)
        await meter.run(entry, [await prompts.take(cell.prompt_len) for _ in range(cell.concurrency)])
        self._done += 1
        self._tell(f"proving what {arm.name} sends, {cell}")
        traced, events = await self._traced(meter, prompts, cell, arm, entry.wall_s)
        policy, proof = self._policies[arm.name], self._facts.proof
        self._blame(arm, cell, proof.traced_faults(policy, events))
        self._blame(arm, cell, proof.counted_faults(policy, cell, self._options.output_len, traced.counts))
        self._keep_times(arm, events)
        if self.comm.get("link") is not None and cell.concurrency == 1:
            gathered = sum(c.bytes_sent for c in traced.counts if c.op == "all_gather" and c.phase == "prefill")
            messages = proof.messages(policy, cell.prompt_len, 1)
            self._uses[cell, arm.name] = wire_use(proof.formulas, messages, gathered)
        self._expected_s += traced.wall_s * self._options.repeats
        self._done += 1

    async def _traced(
        self, meter: Meter, prompts: PromptMaker, cell: Cell, arm: Arm, expected_s: float
    ) -> tuple[Entry, list[dict[str, Any]]]:
        """One turn and what was recorded; again where a busy machine was so late that the recording had ended before."""
        for _ in range(_TRACE_TRIES - 1):
            traced, events = await self._traced_once(meter, prompts, cell, arm, expected_s)
            if prompt_sums(events):
                return traced, events
            expected_s = 2 * max(expected_s, traced.wall_s)
        return await self._traced_once(meter, prompts, cell, arm, expected_s)

    async def _traced_once(
        self, meter: Meter, prompts: PromptMaker, cell: Cell, arm: Arm, expected_s: float
    ) -> tuple[Entry, list[dict[str, Any]]]:
        entry = Entry(cell=cell, arm=arm, round=-1, place=0)
        fresh = [await prompts.take(cell.prompt_len) for _ in range(cell.concurrency)]
        return entry, await meter.run_traced(entry, fresh, expected_s=expected_s)

    async def _block(self, meter: Meter, prompts: PromptMaker, block: Block) -> None:
        cell = block.cell
        fresh = [[await prompts.take(cell.prompt_len) for _ in range(cell.concurrency)] for _ in block.arms]
        for place, (arm, own) in enumerate(zip(block.arms, fresh, strict=True)):
            self._tell(f"round {block.round + 1} of {self._options.repeats}: {arm.name}, {cell}")
            entry = Entry(cell=cell, arm=arm, round=block.round, place=place)
            await meter.run(entry, own)
            faults = self._facts.proof.counted_faults(
                self._policies[arm.name], cell, self._options.output_len, entry.counts
            )
            self._blame(arm, cell, faults)
            self._entries.append(entry)
            self._done += 1

    async def _check_answers(self, check: AnswerCheck) -> None:
        """Of each cell and arm, as many timed answers as asked for, spread over the rounds."""
        faults: list[str] = []
        for cell in self._cells:
            for arm in self._arms:
                own = [e for e in self._entries if e.cell == cell and e.arm == arm]
                for number in range(self._options.answers):
                    self._tell(f"checking answers of {arm.name}, {cell}")
                    entry = own[number * len(own) // self._options.answers]
                    agreement = await check.check(entry, entry.requests[number % len(entry.requests)])
                    self._agreements.append(agreement)
                    fault = agreement.fault(self._facts.dtype)
                    faults += [] if fault is None else [fault]
                    self._done += 1
        if faults:
            raise WrongAnswerError("; ".join(faults))

    def _keep_times(self, arm: Arm, events: Sequence[dict[str, Any]]) -> None:
        """AllReduces of prompt rows on rank 0, for the plot by message size."""
        for event in prompt_sums(events):
            if event["pid"] == 0:
                size, seconds = event["args"]["message_bytes"], event["dur"] / 1e6
                self.traces.append({"arm": arm.name, "message_bytes": size, "seconds": seconds})

    def _blame(self, arm: Arm, cell: Cell, faults: Sequence[str]) -> None:
        if faults:
            raise WrongAnswerError(f"{arm.name}, {cell}: {'; '.join(faults)}")

    def _tell(self, what: str) -> None:
        self._told(what, self._done, self.num_entries)
