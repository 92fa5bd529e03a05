"""Runs one arm once in one cell: so many requests at a time, each timed at the client, and what the ranks counted meanwhile."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tightwire.bench.client import BenchClient, Prompt
from tightwire.bench.ttft.plan import Arm, Cell
from tightwire.bench.ttft.prompts import TextPrompt
from tightwire.comm.ledger.ledger import Count
from tightwire.server.cli.remote import Remote, ask

_TRACE_LEAD_S = 0.2  # until all ranks record
_TRACE_SLACK_S = 0.1
_TRACE_MAX_S = 30.0  # the server's own limit


@dataclass(kw_only=True, slots=True)
class Request:
    """One answered request; times in seconds at the client, ``parts`` as the server splits its own ``ttft_s``."""

    prompt: TextPrompt
    ttft_s: float
    tpot_s: float
    e2e_s: float
    itl_s: list[float]
    parts: dict[str, float | None]
    decode_share: float  # of the time after the first token, spent in collectives
    token_ids: list[int]


@dataclass(kw_only=True, slots=True)
class Entry:
    """One arm's turn in a block."""

    cell: Cell
    arm: Arm
    round: int
    place: int  # in the block's order
    wall_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)  # of rank 0, for this entry alone

    @property
    def tokens_per_s(self) -> float:
        """Generated ones, over the whole entry."""
        return sum(len(request.token_ids) for request in self.requests) / self.wall_s


class RequestFailedError(RuntimeError):
    """A request of the bench was not answered as asked: nothing measured beside it is worth much."""


class Meter:
    """Talks to the server that is measured."""

    def __init__(self, client: BenchClient, http: httpx.AsyncClient, remote: Remote, *, output_len: int) -> None:
        self._client, self._http, self._remote, self._output_len = client, http, remote, output_len

    async def run(self, entry: Entry, prompts: Sequence[TextPrompt]) -> None:
        """Send all prompts at once, wait for all answers, and fill ``entry``.

        Raises:
            RequestFailedError: an answer failed, or is not as long as asked.
        """
        before = await self.counts()
        began = time.perf_counter()
        entry.requests = list(await asyncio.gather(*(self._request(entry, prompt) for prompt in prompts)))
        entry.wall_s = time.perf_counter() - began
        after = await self.counts()
        changed = (count.since(before.get(key)) for key, count in after.items())
        entry.counts = [count for count in changed if count.calls]

    async def run_traced(
        self, entry: Entry, prompts: Sequence[TextPrompt], *, expected_s: float
    ) -> list[dict[str, Any]]:
        """``run``, and every collective of every rank meanwhile (the first half minute of them), as trace events."""
        seconds = min(_TRACE_MAX_S, _TRACE_LEAD_S + 1.5 * expected_s + _TRACE_SLACK_S)
        recording = asyncio.create_task(self._get(f"comm/trace?seconds={seconds:.3f}", seconds + 60.0))
        try:
            await asyncio.sleep(_TRACE_LEAD_S)
            await self.run(entry, prompts)
        except BaseException:
            recording.cancel()
            raise
        return (await recording)["traceEvents"]

    async def comm(self) -> dict[str, Any]:
        """GET /comm."""
        return await self._get("comm", 30.0)

    async def counts(self) -> dict[tuple[str, str, str], Count]:
        """Totals of rank 0 since its start."""
        rows = [
            Count(**{key: row[key] for key in Count._fields if key in row}) for row in (await self.comm())["counters"]
        ]
        return {row[:3]: row for row in rows}

    async def _get(self, route: str, timeout_s: float) -> dict[str, Any]:
        return await ask(self._http, f"{self._remote.root}/{route}", timeout_s=timeout_s)

    async def _request(self, entry: Entry, prompt: TextPrompt) -> Request:
        extra: dict[str, Any] = {}
        options = {**entry.arm.option, "timing": True, "comm": True, "token_ids": True}
        sample = await self._client.measure(
            Prompt(content=prompt.text, max_tokens=self._output_len),
            extra_body={"tightwire": options},
            watch=lambda event: extra.update(event.get("tightwire") or {}),
        )
        problem = sample.error
        if problem is None and "timing" not in extra:
            problem = "the server sends no timing; its version must be this bench's own"
        if problem is None and sample.num_prompt != len(prompt.token_ids):
            problem = f"the server counted {sample.num_prompt} prompt tokens, not {len(prompt.token_ids)}"
        token_ids = extra.get("token_ids", [[]])[0]
        if problem is None and not sample.num_generated == len(token_ids) == self._output_len:
            problem = f"the answer has {sample.num_generated} tokens ({len(token_ids)} ids), not {self._output_len}"
        if problem is None and sample.ttft_s is None:
            problem = "the answer has no text, and so no TTFT"
        if problem is not None:
            raise RequestFailedError(f"a request failed ({entry.arm.name}, {entry.cell}): {problem}")
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
