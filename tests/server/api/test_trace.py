"""The record of a request: times by a clock of the test's own, through the app, and on a real server."""

import json
import time
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine
from msgspec import UNSET

from tightwire.server.api.metrics import Metrics
from tightwire.server.api.trace import RequestRecord, RequestTrace
from tightwire.server.ipc.engine_stats import DraftReport
from tightwire.server.ipc.messages import FirstToken, Output

PARTS = ("http_s", "tokenize_s", "queue_s", "compute_s", "allreduce_s", "codec_s", "sampling_s", "engine_s", "send_s")
FIRST = FirstToken(20.0, 30.0, compute_s=4.0, allreduce_s=3.0, codec_s=1.0, sampling_s=0.5)
ASKED = {"timing": True}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_trace(clock: Clock, *, streamed: bool = True) -> RequestTrace:
    """A request that arrived at 10, was tokenized for 2, and went to the engine at 15."""
    record = RequestRecord(id="a", method="POST", path="/", arrived_s=10.0)
    trace = RequestTrace(FakeEngine(), Metrics(lambda: None), record, streamed=streamed, clock=clock)
    clock.now_s = 11.0
    with trace.tokenizing():
        clock.now_s = 13.0
    clock.now_s = 15.0
    trace.submitted(["0", "1"])
    return trace


def token(first: FirstToken | None = None, id_: str = "0") -> Output:
    return Output(id=id_, token_ids=[65], first_token=first)


def assert_adds_up(timing: dict[str, Any]) -> None:
    assert timing.keys() == {"ttft_s", *PARTS}
    assert all(timing[part] is None or timing[part] >= 0 for part in PARTS)
    assert sum(timing[part] or 0.0 for part in PARTS) == pytest.approx(timing["ttft_s"], abs=1e-12)


def test_parts_of_a_stream(clock: Clock) -> None:
    trace = make_trace(clock)
    trace.saw(token(FIRST))
    assert trace.timing is None  # its text is still held back
    clock.now_s = 33.0
    trace.sent()
    clock.now_s = 99.0
    trace.saw(token())
    trace.sent()

    timing = trace.timing
    assert timing is not None and timing.ttft_s == 23.0
    assert [getattr(timing, part) for part in PARTS] == [3.0, 2.0, 5.0, 4.0, 3.0, 1.0, 0.5, 1.5, 3.0]


def test_a_whole_answer_ends_with_its_first_token(clock: Clock) -> None:
    trace = make_trace(clock, streamed=False)
    clock.now_s = 31.0
    trace.saw(token(FIRST))
    clock.now_s = 60.0
    trace.saw(token(FirstToken(40.0, 50.0, 0.0, 0.0, 0.0, 0.0), "1"))

    assert trace.timing is not None and (trace.timing.ttft_s, trace.timing.send_s) == (21.0, 1.0)


def test_drafts_with_the_tokens_of_a_sum_after_the_first(clock: Clock) -> None:
    engine, record = FakeEngine(), RequestRecord(id="a", method="POST", path="/")
    trace = RequestTrace(engine, Metrics(lambda: None), record, streamed=False, clock=clock)
    trace.submitted(["0"])
    engine.num_outputs = 3  # of 4 sums each
    trace.saw(token(FIRST))
    trace.saw(token())
    assert trace.draft_report() is UNSET
    engine.num_outputs = 5
    trace.saw(Output(id="0", token_ids=[66, 67, 68], num_drafted=4, num_right=2))
    assert trace.draft_report() == DraftReport(steps=1, tokens=4, accepted=2, mean_length=2.0, tokens_per_sum=0.5)


def test_times_between_tokens_add_up_where_a_step_brings_several(clock: Clock) -> None:
    metrics, record = Metrics(lambda: None), RequestRecord(id="a", method="POST", path="/")
    trace = RequestTrace(FakeEngine(), metrics, record, streamed=True, clock=clock)
    trace.submitted(["0"])
    for now_s, num_tokens in ((10.0, 2), (16.0, 3), (17.0, 1)):
        clock.now_s = now_s
        trace.saw(Output(id="0", token_ids=[65] * num_tokens))
    page = metrics.render("")[0].decode()
    assert "\ntightwire_inter_token_latency_seconds_count 5.0\n" in page  # of 6 tokens
    assert "\ntightwire_inter_token_latency_seconds_sum 7.0\n" in page
    assert '\ntightwire_inter_token_latency_seconds_bucket{le="2.5"} 5.0\n' in page


def test_codec_time_in_a_fused_kernel_is_unknown(clock: Clock) -> None:
    trace = make_trace(clock, streamed=False)
    clock.now_s = 31.0
    trace.saw(token(FirstToken(20.0, 30.0, compute_s=4.0, allreduce_s=4.0, codec_s=None, sampling_s=0.5)))

    timing = trace.timing
    assert timing is not None and timing.codec_s is None and (timing.engine_s, timing.ttft_s) == (1.5, 21.0)


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The extra of the answer, whole or at the end of a stream."""
    prompt = {"prompt": "abc"} if path.endswith("/v1/completions") else {"messages": [{"role": "user", "content": "x"}]}
    response = await client.post(path, json=prompt | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json().get("tightwire", {})
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert not any("tightwire" in event for event in events[:-1])
    return events[-1].get("tightwire", {})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("how", [{}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3, "max_tokens": 1}], ids=str)
async def test_timing_is_in_the_answer_on_request(client: httpx.AsyncClient, path: str, how: dict[str, Any]) -> None:
    start_s = time.monotonic()
    extra = await ask(client, path, **how, tightwire=ASKED)
    seconds = time.monotonic() - start_s

    assert extra.keys() == {"timing"}
    assert_adds_up(extra["timing"])
    assert 0 < extra["timing"]["ttft_s"] < seconds
    assert await ask(client, path, **how) == {}


async def test_timing_with_comm_and_echo(client: httpx.AsyncClient) -> None:
    both = ASKED | {"comm": True}
    extra = await ask(client, "/v1/completions", stream=True, echo=True, max_tokens=0, tightwire=both)

    assert extra.keys() == {"comm", "timing"}
    assert_adds_up(extra["timing"])


async def test_timing_is_null_without_a_first_token(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tells_times = False

    assert await ask(client, "/v1/completions", tightwire=ASKED) == {"timing": None}


async def test_metrics_sum_the_parts_of_every_request(client: httpx.AsyncClient) -> None:
    for stream in (False, True):
        await ask(client, "/v1/completions", stream=stream)
    page = (await client.get("/metrics")).text

    for part in PARTS:
        assert f'tightwire_time_to_first_token_part_seconds_count{{part="{part[:-2]}"}} 2.0' in page
