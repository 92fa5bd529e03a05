"""Whether timed answers are right: their prompts again, untimed, on a lossless arm, token by token until they part.

A lossless arm may part from it only where two tokens are as good as equally likely: sums in another order
round differently. A lossy one may part anywhere, and where and by how much is its agreement; but a token that the exact
model thinks absurd is a wrong answer.
"""

from dataclasses import dataclass
from typing import Any

import httpx

from tightwire.bench.ttft.meter import Entry, Request
from tightwire.bench.ttft.plan import Arm, Cell
from tightwire.server.cli.remote import Remote, RemoteError, ask

NEAR_TIE_NATS = {"bfloat16": 0.25, "float16": 0.05, "float32": 1e-3}
ABSURD_NATS = 4.0
UNLIKELY_NATS = 1.0  # for a token that is not among the likeliest; with random weights hundreds are nearly as likely
_TOP = 20
_FORCE = 100.0  # the largest bias there is; logprobs are those before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """One timed answer beside the reference's. ``gap``: nats from the reference's token to the arm's where they part."""

    cell: Cell
    arm: Arm
    matched: int  # tokens from the start that are the same
    num_tokens: int
    gap: float | None = None  # None: they never part
    in_top: bool = True  # the arm's token is among the reference's 20 likeliest there

    def fault(self, dtype: str) -> str | None:
        """Why this is a wrong answer; None when it is none."""
        if self.gap is None:
            return None
        where = f"{self.arm.name}, {self.cell}: token {self.matched + 1} of {self.num_tokens} is {self.gap:.3g} nats "
        where += "less likely to the lossless reference than its own"
        if self.arm.lossless and self.gap > NEAR_TIE_NATS[dtype]:
            return f"{where}; a lossless one may be {NEAR_TIE_NATS[dtype]:g}"
        if self.gap > ABSURD_NATS or (self.gap > UNLIKELY_NATS and not self.in_top):
            return f"{where}, which is absurd"
        return None


class AnswerCheck:
    """Asks the reference, which is lossless where any arm is. Deterministic: a greedy answer does not depend on what runs beside it."""

    def __init__(self, http: httpx.AsyncClient, remote: Remote, reference: Arm) -> None:
        self._http, self._remote, self._reference = http, remote, reference

    async def check(self, entry: Entry, request: Request) -> Agreement:
        """Compare one timed answer.

        Raises:
            RemoteError: the server failed.
        """
        asked = {"prompt": request.prompt.text, "max_tokens": len(request.token_ids)}
        exact = (await self._complete(asked))["tightwire"]["token_ids"][0]
        num = len(request.token_ids)
        matched = next((i for i, (a, b) in enumerate(zip(request.token_ids, exact, strict=True)) if a != b), None)
        if matched is None:
            return Agreement(cell=entry.cell, arm=entry.arm, matched=num, num_tokens=num)
        gap, in_top = await self._gap([*request.prompt.token_ids, *exact[:matched]], request.token_ids[matched])
        return Agreement(cell=entry.cell, arm=entry.arm, matched=matched, num_tokens=num, gap=gap, in_top=in_top)

    async def _gap(self, context: list[int], token_id: int) -> tuple[float, bool]:
        """How much less likely than the likeliest the reference thinks ``token_id``, and whether it is among the first."""
        asked = {"prompt": context, "max_tokens": 1, "logprobs": _TOP, "logit_bias": {str(token_id): _FORCE}}
        logprobs = (await self._complete(asked))["choices"][0]["logprobs"]
        # Tokens may share their text, as halves of characters do, so places in this table are told by their numbers.
        top, own = sorted(logprobs["top_logprobs"][0].values(), reverse=True), logprobs["token_logprobs"][0]
        return max(0.0, top[0] - own), own >= top[-1]

    async def _complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self._remote.model,
            "temperature": 0,
            "ignore_eos": True,
            "tightwire": {**self._reference.option, "token_ids": True},
            **asked,
        }
        try:
            return await ask(self._http, f"{self._remote.base}/completions", body)
        except RemoteError as error:
            raise RemoteError(f"checking an answer: {error}") from error
