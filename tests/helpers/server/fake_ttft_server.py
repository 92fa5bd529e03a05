"""A fake server with all that ``bench ttft`` needs: arms, timing, counters, a tokenizer of words. And its lies."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from helpers.server.fake_openai import FakeServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tightwire.bench.ttft.proof import ArmPolicy, Proof

OWN = "two-shot"


def lines(prompt: str, decode: str = OWN) -> list[dict[str, Any]]:
    """The policy that ``--allreduce prompt`` makes, as GET /comm shows it."""
    sums = {"embed": decode, "o_proj": prompt, "down_proj": prompt}
    return [
        {"site": site, "phase": phase, "up_to_bytes": None, "layers": None, "algorithm": algorithm, "reason": ""}
        for site, sum_by in sums.items()
        for phase, algorithm in (("prefill", sum_by), ("decode", decode))
    ]


@dataclass(kw_only=True)
class FakeTtftServer(FakeServer):
    """Sums nothing, but counts what the honest server of this shape would; the fields below make it lie."""

    proof: Proof
    extra: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"flash-int8": lines("flash-int8")})
    runs_instead: str | None = None  # whatever was asked for
    runs_instead_from: int = 0  # the number of the first streamed request that is so treated
    stages: bool = False  # that prompts pass, unless a request asks for tensors
    link: dict[str, Any] | None = None
    _counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    _words: dict[str, int] = field(default_factory=dict)

    def app(self) -> Starlette:
        app = super().app()
        app.routes.extend(
            [
                Route("/comm", self._comm),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )
        return app

    async def _comm(self, request: Request) -> Response:
        counters = [
            {
                "op": "all_reduce",
                "algorithm": algorithm,
                "phase": phase,
                "calls": calls,
                "bytes_sent": sent,
                "exact_bytes": sent,
                "seconds": 0.0,
                "message_bytes": size,
                "codec_seconds": 0.0,
            }
            for (algorithm, phase), (calls, size, sent) in self._counts.items()
        ]
        return JSONResponse(
            {
                "choices": lines(OWN),
                "extra": self.extra,
                "counters": counters,
                "link": self.link,
                "transport": "fake",
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        words = (await request.json())["prompt"].split()
        return JSONResponse({"tokens": [self._words.setdefault(word, len(self._words)) for word in words]})

    async def _tokens(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        arm = body["tightwire"].get("allreduce", OWN)
        async for event in super()._tokens(body):
            if event["usage"]:
                staged = self.stages and body["tightwire"].get("prefill") != "tensor"
                self._run(arm, 0 if staged else len(body["prompt"]), body["max_tokens"])
                event["tightwire"] = {
                    "timing": {"ttft_s": 0.01, "compute_s": 0.004, "allreduce_s": 0.005, "codec_s": 0.001},
                }
            yield event

    def _run(self, arm: str, prompt_len: int, output_len: int) -> None:
        """Count one request that has its steps to itself."""
        policy = ArmPolicy(self.extra.get(arm, lines(OWN)))
        for name, phase, num_bytes in self.proof.messages(policy, prompt_len, output_len):
            lies = self.runs_instead is not None and len(self.bodies) > self.runs_instead_from
            algorithm = self.runs_instead or "" if lies else name
            sent = self.proof.sent_bytes(algorithm, num_bytes)
            totals = self._counts.setdefault((algorithm, phase), [0, 0, 0])
            for place, amount in enumerate((1, num_bytes, sent)):
                totals[place] += amount
