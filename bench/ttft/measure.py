"""Measures on a server that is ready: warms up and proves each arm, then times random rounds and proves every turn.

A prompt is a passage of real text as token ids. No two begin at the same place, so a prefix cache cannot help.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import httpx

from tightwire.bench.client import BenchClient, Prompt, ask
from tightwire.bench.hosts import EmulatedHosts, Sent
from tightwire.bench.run import BenchFailedError
from tightwire.bench.ttft.facts import ServerFacts
from tightwire.bench.ttft.options import AUTO, TENSOR, TtftOptions
from tightwire.bench.ttft.proof import SITES, ArmPolicy, Cell
from tightwire.comm.all_reduce.make import parse_all_reduce
from tightwire.comm.ledger.ledger import Count
from tightwire.comm.policy.rules import DROP
from tightwire.remote import Remote
from tightwire.training.data.documents import english_text

_WARM_UPS = 2  # turns of each arm in each cell
_TIMEOUT_S = 1800.0  # of one request: a long prompt over a slow wire takes minutes


class RequestFailedError(RuntimeError):
    """An answer failed or has another length than requested; the turn is not usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One AllReduce, policy file or layout under test.

    ``name`` differs from ``algorithm`` when the same algorithm is compared with itself. ``is_default``: ``auto`` or hybrid, the server's
    own, which a request need not name. ``error``: relative RMS error of one AllReduce, 0 when lossless.
    """

    name: str
    algorithm: str
    is_default: bool
    lossless: bool
    error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One answered request. Times are seconds at the client; ``parts`` is how the server splits its own ``ttft_s``."""

    ttft_s: float
    tpot_s: float
    parts: Mapping[str, float | None]
    # Counts of host 0's interface for the prompt and for all later tokens; None with one host or several requests at a time.
    wire: tuple[Sent, Sent] | None = None


@dataclass(kw_only=True, slots=True)
class Turn:
    """One arm in one cell of one round: all its requests at once."""

    cell: Cell
    arm: Arm
    round: int
    requests: list[Request] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)  # of rank 0, during this turn

    def mean(self, name: str) -> float:
        return fmean(getattr(request, name) for request in self.requests)


@dataclass(kw_only=True, slots=True)
class Measured:
    """The results so far. Every arm has a turn in each cell and round in ``turns``; unfinished ones are not there."""

    cells: Sequence[Cell]
    seed: int = 0
    output_len: int = 2
    baseline_name: str = AUTO
    arms: list[Arm] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    comm: dict[str, Any] = field(default_factory=dict)  # GET /comm, before the first request
    ranks_share_wire: bool = False  # of an emulated link between nodes of several ranks
    num_peers: int = 0  # ranks on other hosts, each the only one there; 0: not measured on such hosts

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.algorithm == self.baseline_name)

    @property
    def default(self) -> Arm:
        return next(arm for arm in self.arms if arm.is_default)

    def of(self, cell: Cell, arm: Arm) -> list[Turn]:
        """The turns of an arm in order of the rounds, so that the lists of two arms of a cell are paired."""
        own = (turn for turn in self.turns if turn.cell == cell and turn.arm == arm)
        return sorted(own, key=lambda turn: turn.round)


def make_turns(cells: Sequence[Cell], arms: Sequence[Arm], rounds: int, seed: int) -> Iterator[list[Turn]]:
    """One list a round: cells and arms in random order; arms of a cell follow each other, so drift affects all."""
    source = random.Random(f"{seed}/blocks")
    for number in range(rounds):
        for cell in source.sample(list(cells), len(cells)):
            yield [Turn(cell=cell, arm=arm, round=number) for arm in source.sample(list(arms), len(arms))]


class Passages:
    """Passages of one tokenized text. No two begin at the same token, so none repeats the prefix of another."""

    def __init__(self, token_ids: Sequence[int], *, seed: int = 0) -> None:
        self._token_ids = list(token_ids)
        self._starts = random.Random(seed).sample(range(len(self._token_ids)), len(self._token_ids))

    def take(self, num_tokens: int) -> list[int]:
        """``num_tokens`` consecutive ids from a start that was not used before; raises ValueError if there is none left."""
        for start in self._starts:
            if start + num_tokens <= len(self._token_ids):
                self._starts.remove(start)
                return self._token_ids[start : start + num_tokens]
        raise ValueError(
            f"the text has {len(self._token_ids)} tokens and no unused start left for a passage of {num_tokens}; "
            "give a longer text"
        )


class Measurement:
    """Fills ``measured``; calls ``show`` with the name of each step and the number of turns that are done."""

    def __init__(self, options: TtftOptions, facts: ServerFacts, show: Callable[[str, int], None]) -> None:
        self._options, self._facts, self._show = options, facts, show
        cells = [Cell(prompt_len=n, concurrency=count) for n in options.prompt_lens for count in options.concurrency]
        parallel = facts.config.parallel
        self.measured = Measured(
            cells=cells,
            seed=options.config.model.seed,
            output_len=options.output_len,
            baseline_name=options.baseline_name,
            ranks_share_wire=parallel.tp > parallel.wire_nodes,
        )
        self._policies: dict[str, ArmPolicy] = {}
        self._done = 0
        self._hosts: EmulatedHosts | None = None
        self._link: dict[str, Any] | None = None

    def use_hosts(self, hosts: EmulatedHosts) -> None:
        """Count the bytes of these hosts, which run the server, and measure their link now."""
        self._hosts, self._link = hosts, hosts.facts()
        self.measured.num_peers = 0 if self.measured.ranks_share_wire else hosts.num_hosts - 1

    @property
    def num_turns(self) -> int:
        """Turns of arms, warm-ups included."""
        options = self._options
        return len(self.measured.cells) * len(options.arms) * (_WARM_UPS + options.repeats)

    async def run(self, remote: Remote) -> AsyncIterator[None]:
        """Measure everything; yields whenever there are new results to keep.

        Raises BenchFailedError for a wrong AllReduce, RequestFailedError, RemoteError, ValueError for too short a text.
        """
        measured, rounds = self.measured, self._options.repeats
        async with AsyncExitStack() as stack:
            await self._connect(remote, stack)
            measured.comm = await self._comm()
            if self._link is not None:
                measured.comm["link"] = self._link
            self._make_arms()
            for number in range(_WARM_UPS):  # one after the other in all cells, so that the time left is soon known
                for cell in measured.cells:
                    for arm in measured.arms:
                        await self._take(Turn(cell=cell, arm=arm, round=-1), f"warm-up {number + 1} of {_WARM_UPS}")
            for turns in make_turns(measured.cells, measured.arms, rounds, measured.seed):
                for turn in turns:
                    await self._take(turn, f"round {turn.round + 1} of {rounds}")
                measured.turns += turns
                yield

    async def _connect(self, remote: Remote, stack: AsyncExitStack) -> None:
        """Open the connections, and let the server tokenize the text of the prompts."""
        self._remote = remote
        body = {"temperature": 0, "ignore_eos": True}
        self._client = await stack.enter_async_context(BenchClient(remote, timeout_s=_TIMEOUT_S, extra_body=body))
        self._http = await stack.enter_async_context(
            httpx.AsyncClient(headers=dict(remote.headers), timeout=_TIMEOUT_S, trust_env=remote.trust_env)
        )
        special, plain = await self._tokenize("A word", special=True), await self._tokenize("A word")
        self._first = special[: len(special) - len(plain)]
        self._passages = Passages(await self._tokenize(english_text()), seed=self.measured.seed)

    def _make_arms(self) -> None:
        measured, seen = self.measured, list[str]()
        for algorithm in self._options.arms:
            seen.append(algorithm)
            again = seen.count(algorithm)
            is_default = algorithm in (AUTO, "hybrid")
            policy = ArmPolicy(measured.comm["extra"].get(algorithm, measured.comm["choices"]))
            used = policy.algorithms("prefill", *SITES)
            arm = Arm(
                name=algorithm if again == 1 else f"{algorithm}#{again}",
                algorithm=algorithm,
                is_default=is_default,
                lossless=all(each != DROP and parse_all_reduce(each).lossless for each in used),
                error=max(self._facts.chooser.error(each) for each in used),
            )
            self._policies[arm.name] = policy
            measured.arms.append(arm)

    async def _take(self, turn: Turn, step: str) -> None:
        """Send new prompts all at once, wait for all answers, fill ``turn`` and prove it."""
        self._show(f"{step}: {turn.arm.name}, {turn.cell}", self._done)
        self._done += 1
        num_text = turn.cell.prompt_len - len(self._first)
        if num_text < 1:
            raise ValueError(f"--prompt-lens must be above {len(self._first)}, the tokens that begin every prompt")
        prompts = [[*self._first, *self._passages.take(num_text)] for _ in range(turn.cell.concurrency)]
        before = await self._counts()
        turn.requests = list(await asyncio.gather(*(self._request(turn, prompt) for prompt in prompts)))
        changed = (count.since(before.get(key)) for key, count in (await self._counts()).items())
        turn.counts = [count for count in changed if count.calls]
        policy = self._policies[turn.arm.name]
        cell = replace(turn.cell, prompt_len=0) if turn.arm.algorithm == "hybrid" else turn.cell  # no prompt is summed
        if faults := self._facts.proof.faults(policy, cell, self._options.output_len, turn.counts):
            raise BenchFailedError(f"wrong AllReduce: {turn.arm.name}, {turn.cell}: {'; '.join(faults)}")

    async def _request(self, turn: Turn, prompt: list[int]) -> Request:
        arm, output_len, extra = turn.arm, self._options.output_len, dict[str, Any]()
        asked = {"prefill": TENSOR} if arm.algorithm == TENSOR else {"allreduce": arm.algorithm}
        sent = [self._hosts.sent()] if self._hosts and turn.cell.concurrency == 1 else []

        def watch(event: dict[str, Any]) -> None:
            extra.update(event.get("tightwire") or {})
            if len(sent) == 1 and self._hosts:  # at the first event
                sent.append(self._hosts.sent())

        sample = await self._client.measure(
            Prompt(content=prompt, max_tokens=output_len),
            extra_body={"tightwire": {"timing": True} | ({} if arm.is_default else asked)},
            watch=watch,
        )
        problem = sample.error
        if problem is None and "timing" not in extra:
            problem = "the server sends no timing; it must have the version of this bench"
        elif problem is None and (sample.num_prompt, sample.num_generated) != (len(prompt), output_len):
            counts = f"{sample.num_prompt} prompt tokens and {sample.num_generated} of the answer"
            problem = f"the server counted {counts}, not {len(prompt)} and {output_len}"
        elif problem is None and sample.ttft_s is None:
            problem = "the answer has no text, so it has no TTFT"
        if problem is not None:
            raise RequestFailedError(f"a request failed ({arm.name}, {turn.cell}): {problem}")
        assert sample.ttft_s is not None and sample.tpot_s is not None
        wire = None
        if len(sent) == 2 and self._hosts:
            wire = sent[1].since(sent[0]), self._hosts.sent().since(sent[1])
        return Request(ttft_s=sample.ttft_s, tpot_s=sample.tpot_s, parts=extra["timing"], wire=wire)

    async def _comm(self) -> dict[str, Any]:
        return await ask(self._http, f"{self._remote.root}/comm", timeout_s=30.0)

    async def _tokenize(self, text: str, *, special: bool = False) -> list[int]:
        body = {"prompt": text, "add_special_tokens": special}
        return (await ask(self._http, f"{self._remote.root}/tokenize", body))["tokens"]

    async def _counts(self) -> dict[tuple[str, str, str], Count]:
        """Totals of rank 0 since its start."""
        rows = (await self._comm())["counters"]
        counts = [Count(**{key: row[key] for key in Count._fields if key in row}) for row in rows]
        return {count[:3]: count for count in counts}
