"""Sends one arm's prompts to the measured server, times the answers and reads the counters of rank 0.

A prompt is a passage of real text as token ids. No two begin at the same place, so a prefix cache cannot help.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

import httpx

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.text import Passages
from tightwire.bench.ttft.proof import Cell
from tightwire.comm.ledger.counters import Count
from tightwire.model.text.prose import english_text
from tightwire.server.cli.remote import Remote, ask

_TIMEOUT_S = 1800.0  # of one request: a long prompt over a slow wire takes minutes
_BODY = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One AllReduce or policy file under test.

    ``name`` differs from ``algorithm`` when the same algorithm is compared with itself. ``is_default``: the server's own,
    which a request need not name. ``error``: relative RMS error of one AllReduce, 0 when lossless.
    """

    name: str
    algorithm: str
    is_default: bool
    lossless: bool
    error: float

    @property
    def option(self) -> dict[str, str]:
        """The ``tightwire`` field of a request that selects this arm."""
        return {} if self.is_default else {"allreduce": self.algorithm}


@dataclass(kw_only=True, slots=True)
class Request:
    """One answered request. Times are seconds at the client; ``parts`` is how the server splits its own ``ttft_s``."""

    prompt: list[int]  # token ids
    ttft_s: float
    tpot_s: float
    e2e_s: float
    itl_s: list[float]
    parts: dict[str, float | None]
    decode_share: float  # share of the time after the first token that is spent in collectives
    token_ids: list[int]


@dataclass(kw_only=True, slots=True)
class Turn:
    """One arm in one cell of one round: all its requests at once. Warm-up turns have a negative ``round``."""

    cell: Cell
    arm: Arm
    round: int
    place: int = 0  # among the arms of this cell and round
    wall_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)  # of rank 0, during this turn

    def mean(self, name: str) -> float:
        """Mean of a field of the requests, or the turn's ``tokens_per_s``."""
        if name == "tokens_per_s":
            return sum(len(request.token_ids) for request in self.requests) / self.wall_s
        return fmean(getattr(request, name) for request in self.requests)


def make_turns(cells: Sequence[Cell], arms: Sequence[Arm], rounds: int, seed: int) -> Iterator[list[Turn]]:
    """For every cell of every round one turn of each arm, cells and arms in random order.

    Arms that are compared run right after each other, so a machine that drifts does so for all of them; a run that is cut
    short has something of every cell.
    """
    source = random.Random(f"{seed}/blocks")
    for number in range(rounds):
        for cell in source.sample(list(cells), len(cells)):
            order = source.sample(list(arms), len(arms))
            yield [Turn(cell=cell, arm=arm, round=number, place=place) for place, arm in enumerate(order)]


class RequestFailedError(RuntimeError):
    """An answer failed or has another length than requested; the turn is not usable."""


class Meter:
    """Runs turns on the measured server; an async context manager."""

    def __init__(self, remote: Remote, *, output_len: int, seed: int) -> None:
        self.remote, self._output_len, self._seed = remote, output_len, seed

    async def __aenter__(self) -> Self:
        remote = self.remote
        self._client = BenchClient(remote, timeout_s=_TIMEOUT_S, extra_body=_BODY)
        self._http = httpx.AsyncClient(headers=dict(remote.headers), timeout=_TIMEOUT_S, trust_env=remote.trust_env)
        special, plain = await self._tokenize("A word"), await self._tokenize("A word", special=False)
        self._first = special[: len(special) - len(plain)]
        self._passages = Passages(await self._tokenize(english_text(), special=False), seed=self._seed)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()
        await self._client.__aexit__(*error)

    async def run(self, turn: Turn) -> Turn:
        """Send new prompts all at once, wait for all answers, and fill ``turn``.

        Raises:
            RequestFailedError: an answer failed, or has another length than requested.
            ValueError: the text has no unused passage of this length.
        """
        num_text = turn.cell.prompt_len - len(self._first)
        if num_text < 1:
            raise ValueError(f"--prompt-lens must be above {len(self._first)}, the tokens that begin every prompt")
        prompts = [[*self._first, *self._passages.take(num_text)] for _ in range(turn.cell.concurrency)]
        before = await self._counts()
        began = time.perf_counter()
        turn.requests = list(await asyncio.gather(*(self._request(turn, prompt) for prompt in prompts)))
        turn.wall_s = time.perf_counter() - began
        changed = (count.since(before.get(key)) for key, count in (await self._counts()).items())
        turn.counts = [count for count in changed if count.calls]
        return turn

    async def comm(self) -> dict[str, Any]:
        """GET /comm."""
        return await ask(self._http, f"{self.remote.root}/comm", timeout_s=30.0)

    async def complete(self, arm: Arm, body: Mapping[str, Any]) -> dict[str, Any]:
        """The untimed greedy answer of ``arm``. Raises RemoteError: the server failed."""
        body = {"model": self.remote.model, **_BODY, "tightwire": {**arm.option, "token_ids": True}, **body}
        return await ask(self._http, f"{self.remote.base}/completions", body)

    async def _tokenize(self, text: str, *, special: bool = True) -> list[int]:
        body = {"prompt": text, "add_special_tokens": special}
        return (await ask(self._http, f"{self.remote.root}/tokenize", body))["tokens"]

    async def _counts(self) -> dict[tuple[str, str, str], Count]:
        """Totals of rank 0 since its start."""
        rows = (await self.comm())["counters"]
        counts = [Count(**{key: row[key] for key in Count._fields if key in row}) for row in rows]
        return {count[:3]: count for count in counts}

    async def _request(self, turn: Turn, prompt: list[int]) -> Request:
        extra: dict[str, Any] = {}
        options = {**turn.arm.option, "timing": True, "comm": True, "token_ids": True}
        sample = await self._client.measure(
            Prompt(content=prompt, max_tokens=self._output_len),
            extra_body={"tightwire": options},
            watch=lambda event: extra.update(event.get("tightwire") or {}),
        )
        token_ids = extra.get("token_ids", [[]])[0]
        problem = sample.error
        if problem is not None:
            pass
        elif "timing" not in extra:
            problem = "the server sends no timing; it must have the version of this bench"
        elif sample.num_prompt != len(prompt):
            problem = f"the server counted {sample.num_prompt} prompt tokens, not {len(prompt)}"
        elif not sample.num_generated == len(token_ids) == self._output_len:
            problem = f"the answer has {sample.num_generated} tokens ({len(token_ids)} ids), not {self._output_len}"
        elif sample.ttft_s is None:
            problem = "the answer has no text, so it has no TTFT"
        if problem is not None:
            raise RequestFailedError(f"a request failed ({turn.arm.name}, {turn.cell}): {problem}")
        assert sample.ttft_s is not None and sample.tpot_s is not None and sample.e2e_s is not None
        return Request(
            prompt=prompt,
            ttft_s=sample.ttft_s,
            tpot_s=sample.tpot_s,
            e2e_s=sample.e2e_s,
            itl_s=sample.itl_s,
            parts=extra["timing"],
            decode_share=extra["comm"]["decode"]["comm_share"],
            token_ids=token_ids,
        )
