"""Measures on a server that is ready: warms up and proves each arm, times random rounds, then checks answers.

Answers are checked by replaying their prompts, untimed, on a lossless arm. A lossless arm may differ from it only where two
tokens are about equally likely, because sums in another order round differently. A lossy arm may differ anywhere, which is
reported as its agreement; but a token that is very unlikely to the lossless arm is a wrong answer.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightwire.bench.run import BenchFailedError
from tightwire.bench.ttft.options import ServerFacts, TtftOptions
from tightwire.bench.ttft.proof import SITES, ArmPolicy, Cell
from tightwire.bench.ttft.requests import Arm, Meter, Request, Turn, make_turns
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.server.cli.remote import Remote

NEAR_TIE_NATS = {"bfloat16": 0.25, "float16": 0.05, "float32": 1e-3}
ABSURD_NATS = 4.0
UNLIKELY_NATS = 1.0  # for a token outside the top 20; with random weights hundreds are nearly as likely
_TOP = 20
_WARM_UPS = 2  # turns of each arm in each cell
_FORCE = 100.0  # the largest logit bias; logprobs are reported as before it


class WrongAnswerError(BenchFailedError):
    """Another AllReduce ran than was asked for, or an answer is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One timed answer compared with the lossless one; ``gap``: by how many nats the arm's first other token is less likely."""

    cell: Cell
    arm: Arm
    matched: int  # equal tokens from the start
    num_tokens: int
    gap: float | None = None  # None: the answers are equal
    in_top: bool = True  # the arm's token is among the 20 likeliest there

    def fault(self, dtype: str) -> str | None:
        """Why this answer is wrong; None if it is right."""
        if self.gap is None:
            return None
        most = NEAR_TIE_NATS[dtype] if self.arm.lossless else ABSURD_NATS
        if not self.in_top:
            most = min(most, UNLIKELY_NATS)
        if self.gap <= most:
            return None
        return (
            f"{self.arm.name}, {self.cell}: token {self.matched + 1} of {self.num_tokens} is {self.gap:.3g} nats less likely "
            f"than the lossless reference's token; at most {most:g} is allowed"
        )


@dataclass(kw_only=True, slots=True)
class Measured:
    """The results so far. Every arm has a turn in each cell and round in ``turns``; unfinished ones are not there."""

    cells: Sequence[Cell]
    seed: int = 0
    arms: list[Arm] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    comm: dict[str, Any] = field(default_factory=dict)  # GET /comm, before the first request
    ranks_share_wire: bool = False  # of an emulated link between nodes of several ranks

    @property
    def baseline(self) -> Arm:
        return next(arm for arm in self.arms if arm.is_default)

    def of(self, cell: Cell, arm: Arm) -> list[Turn]:
        """In order of the rounds, so that the lists of two arms of a cell are paired."""
        own = (turn for turn in self.turns if turn.cell == cell and turn.arm == arm)
        return sorted(own, key=lambda turn: turn.round)


class Measurement:
    """Fills ``measured``; calls ``show`` with the name of each step and the number of turns that are done."""

    def __init__(self, options: TtftOptions, facts: ServerFacts, show: Callable[[str, int], None]) -> None:
        self._options, self._facts, self._show = options, facts, show
        cells = [Cell(prompt_len=n, concurrency=count) for n in options.prompt_lens for count in options.concurrency]
        parallel = options.config.parallel
        self.measured = Measured(
            cells=cells, seed=options.config.model.seed, ranks_share_wire=parallel.tp > parallel.wire_nodes
        )
        self._policies: dict[str, ArmPolicy] = {}
        self._done = 0

    @property
    def num_turns(self) -> int:
        """Turns of arms, warm-ups and checks included."""
        options = self._options
        return len(self.measured.cells) * len(options.algorithms) * (_WARM_UPS + options.repeats + 1)

    async def run(self, remote: Remote) -> AsyncIterator[None]:
        """Measure everything; yields whenever there are new results to keep.

        Raises:
            WrongAnswerError: a proof or an answer is wrong.
            RequestFailedError, RemoteError: the server failed.
            ValueError: the text has too few prompts of these lengths.
        """
        measured, options, seed = self.measured, self._options, self.measured.seed
        async with Meter(remote, output_len=options.output_len, seed=seed) as meter:
            measured.comm = await meter.comm()
            self._make_arms()
            for cell in measured.cells:
                for arm in measured.arms:
                    await self._warm_up(meter, cell, arm)
            for turns in make_turns(measured.cells, measured.arms, options.repeats, seed):
                for turn in turns:
                    self._step(f"round {turn.round + 1} of {options.repeats}: {turn.arm.name}, {turn.cell}")
                    self._check_counts(await meter.run(turn))
                measured.turns += turns
                yield
            await self._check_answers(meter)
            yield

    def _make_arms(self) -> None:
        """Make the arms from what the server says of them."""
        measured, seen = self.measured, list[str]()
        for algorithm in self._options.algorithms:
            seen.append(algorithm)
            again = seen.count(algorithm)
            is_default = algorithm == self._options.baseline_name
            policy = ArmPolicy(measured.comm["choices"] if is_default else measured.comm["extra"][algorithm])
            used = policy.algorithms("prefill", *SITES)
            arm = Arm(
                name=algorithm if again == 1 else f"{algorithm}#{again}",
                algorithm=algorithm,
                is_default=is_default,
                lossless=all(parse_all_reduce(each).lossless for each in used),
                error=max(self._facts.chooser.error(each) for each in used),
            )
            self._policies[arm.name] = policy
            measured.arms.append(arm)

    async def _warm_up(self, meter: Meter, cell: Cell, arm: Arm) -> None:
        """Two turns that are checked and not timed."""
        turn = Turn(cell=cell, arm=arm, round=-1)
        for _ in range(_WARM_UPS):
            self._step(f"warming up {arm.name}, {cell}")
            self._check_counts(await meter.run(turn))

    async def _check_answers(self, meter: Meter) -> None:
        """Check one timed answer of each cell and arm."""
        measured, faults = self.measured, list[str]()
        lossless = [arm for arm in (measured.baseline, *measured.arms) if arm.lossless]
        reference = lossless[0] if lossless else measured.baseline
        for cell in measured.cells:
            for arm in measured.arms:
                self._step(f"checking an answer of {arm.name}, {cell}")
                turn = measured.of(cell, arm)[0]
                agreement = await check_answer(meter, reference, turn, turn.requests[0])
                measured.agreements.append(agreement)
                if (fault := agreement.fault(self._facts.dtype)) is not None:
                    faults.append(fault)
        if faults:
            raise WrongAnswerError(f"wrong answer: {'; '.join(faults)}")

    def _check_counts(self, turn: Turn) -> None:
        policy, output_len = self._policies[turn.arm.name], self._options.output_len
        if faults := self._facts.proof.faults(policy, turn.cell, output_len, turn.counts):
            raise WrongAnswerError(f"wrong answer: {turn.arm.name}, {turn.cell}: {'; '.join(faults)}")

    def _step(self, what: str) -> None:
        self._show(what, self._done)
        self._done += 1


async def check_answer(meter: Meter, reference: Arm, turn: Turn, request: Request) -> Agreement:
    """Compare one timed answer with the ``reference`` arm's answer to the same prompt.

    Raises:
        RemoteError: the server failed.
    """
    own, num = request.token_ids, len(request.token_ids)
    answer = await meter.complete(reference, {"prompt": request.prompt, "max_tokens": num})
    exact = answer["tightwire"]["token_ids"][0]
    matched = next((i for i, (a, b) in enumerate(zip(own, exact, strict=True)) if a != b), None)
    if matched is None:
        return Agreement(cell=turn.cell, arm=turn.arm, matched=num, num_tokens=num)
    context, bias = [*request.prompt, *exact[:matched]], {str(own[matched]): _FORCE}
    forced = await meter.complete(reference, {"prompt": context, "max_tokens": 1, "logprobs": _TOP, "logit_bias": bias})
    logprobs = forced["choices"][0]["logprobs"]
    # Several tokens may have the same text, such as halves of a character, so the table is read by its numbers.
    top, forced_logprob = sorted(logprobs["top_logprobs"][0].values(), reverse=True), logprobs["token_logprobs"][0]
    return Agreement(
        cell=turn.cell,
        arm=turn.arm,
        matched=matched,
        num_tokens=num,
        gap=max(0.0, top[0] - forced_logprob),
        in_top=forced_logprob >= top[-1],
    )
