"""GET /, /comm and /comm/trace over a scripted engine. Health and metrics have their own files."""

import asyncio
import dataclasses
import shlex
import threading

import httpx
import msgspec
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of, serve

from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import (
    EngineState,
    EngineUnavailableError,
    Phase,
    RankSilentError,
    RecordingBusyError,
)
from tightwire.server.ipc.messages import CommChoice, CommSetup, SelfTestVerdict


@pytest.mark.parametrize("accept", ["*/*", "application/json", None])
async def test_home_says_what_this_is(client: httpx.AsyncClient, accept: str | None) -> None:
    page = (await client.get("/", headers={"accept": accept} if accept else {})).json()
    assert page["name"].startswith("Tightwire ") and (page["model"], page["status"]) == ("tiny", "ready")
    for path in page["links"]:
        assert (await client.get(path)).status_code == 200
    assert {"/docs", "/metrics", "/health"} <= page["links"].keys()
    assert "curl http://test/v1/chat/completions" in page["example"]


async def test_docs_list_every_route_without_a_script_or_another_server(client: httpx.AsyncClient) -> None:
    text = (await client.get("/docs")).text
    for path in (await client.get("/openapi.json")).json()["paths"]:
        assert f"<code>{path}</code>" in text
    assert "<script" not in text and "http" not in text
    assert 'rel=icon href="/web/icon.svg"' in text, "browsers would ask for /favicon.ico, which is a 404"
    assert "name=viewport" in text and 'content="light dark"' in text


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics"])
def test_head_answers_as_get_without_the_body(engine: FakeEngine, path: str) -> None:
    with serve(app_for(engine)) as url:
        head, get = httpx.head(url + path), httpx.get(url + path)
        assert httpx.head(f"{url}/v1/completions").status_code == 405
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(("key", "chat"), [(None, True), ("secret", False)])
def test_the_example_of_home_runs(engine: FakeEngine, key: str | None, chat: bool) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with serve(app_for(engine, chat=chat, http=HttpOptions(api_key=key))) as url:
        assert httpx.get(url).status_code == (401 if key else 200)
        example = httpx.get(url, headers=headers).json()["example"].replace("KEY", key or "")
        # Not the real curl, which not every machine has.
        _, address, *options = shlex.split(example.replace("\\\n", " "))
        given = dict(
            option.split(": ", 1) for flag, option in zip(options[::2], options[1::2], strict=True) if flag == "-H"
        )
        answer = httpx.post(address, headers=given, content=options[-1])
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 1


async def test_home_while_loading(engine: FakeEngine) -> None:
    engine.state = EngineState(phase=Phase.LOADING, reason="weights 40%")
    async with client_of(app_for(engine, loaded=False)) as client:
        page = (await client.get("/")).json()
    assert page["model"] is None and "weights 40%" in page["status"]


def test_home_of_another_node_names_node_0_and_gives_a_command_that_works(engine: FakeEngine) -> None:
    engine.state = EngineState(phase=Phase.READY, reason="this is node 1; send requests to node 0 at 10.0.0.1")
    with serve(app_for(engine)) as url:
        page = httpx.get(url, headers={"user-agent": "curl/8", "accept": "*/*"}).text
        command, address = shlex.split(page.splitlines()[-1])
        assert command == "curl" and httpx.get(address).status_code == 200
    assert "tiny: ready: this is node 1; send requests to node 0 at 10.0.0.1.\n" in page


async def test_comm_lists_policies_and_cost(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    idle = (await client.get("/comm")).json()
    assert (idle["choices"], idle["self_test"], idle["transport"]) == ([], [], "none")
    assert idle["counters"][0]["mean_us"] is None and idle["counters"][0]["algbw_gb_per_s"] is None
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
    choice = CommChoice("o_proj", "prefill", None, "flash-int8", "predicted 120 us against 400 us")
    verdict = SelfTestVerdict("flash-int8", True, "1 and 2048 rows")
    engine.comm_setup = CommSetup(transport="shared-memory", num_nodes=1, choices=[choice], self_test=[verdict])
    policy = (await client.get("/comm")).json()
    assert (policy["algorithm"], policy["tp"], policy["transport"], policy["num_nodes"]) == (
        "native",
        2,
        "shared-memory",
        1,
    )
    assert policy["choices"] == [msgspec.structs.asdict(choice)]
    assert policy["self_test"] == [dataclasses.asdict(verdict)]
    assert policy["drafts"] == {"steps": 10, "tokens": 30, "accepted": 20, "mean_length": 2.0, "tokens_per_sum": 0.25}
    (cost,) = policy["counters"]
    assert (cost["op"], cost["calls"], cost["p50_us"], cost["p99_us"]) == ("all_reduce", 12, 3.0, 9.0)
    # The scripted engine takes 1 us for every 4 collectives of 500 bytes together.
    assert cost["mean_us"] == pytest.approx(0.25) and cost["algbw_gb_per_s"] == pytest.approx(0.5)
    assert (policy["bytes_sent"], policy["exact_bytes"], policy["saved_bytes"]) == (3000, 4500, 1500)


async def test_a_trace_has_all_ranks_for_the_requested_time(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.get("/comm/trace", params={"seconds": 0.5})
    assert response.headers["content-disposition"].startswith('attachment; filename="tightwire-collectives-')
    assert {event["pid"] for event in response.json()["traceEvents"] if event["ph"] == "X"} == {0, 1}
    await client.get("/comm/trace")
    assert engine.recordings == [0.5, 2.0]


def test_a_client_that_leaves_ends_its_recording(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def record(seconds: float) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(engine, "record_collectives", record)
    with serve(app_for(engine)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/comm/trace", params={"seconds": 30}, timeout=0.5)
        assert ended.wait(20)


@pytest.mark.parametrize("seconds", ["0", "-1", "30.1", "nan", "inf", "soon", ""])
async def test_trace_length_is_limited(client: httpx.AsyncClient, engine: FakeEngine, seconds: str) -> None:
    response = await client.get("/comm/trace", params={"seconds": seconds})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "seconds" and "at most 30" in error["message"] and repr(seconds) in error["message"]
    assert engine.recordings == []


async def test_trace_rejects_other_parameters(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    response = await client.get("/comm/trace", params={"seconds": "1", "second": "1"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "second", "unknown_parameter")
    assert "seconds" in error["message"] and engine.recordings == []


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (RecordingBusyError("being recorded for someone else"), 409, "recording_busy"),
        (RankSilentError("rank 1 did not send"), 504, "rank_silent"),
        (EngineUnavailableError("rank 1 was killed"), 503, "unavailable"),
    ],
)
async def test_a_failed_trace_says_why(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    status: int,
    code: str,
) -> None:
    async def fail(seconds: float) -> None:
        raise failure

    monkeypatch.setattr(engine, "record_collectives", fail)
    response = await client.get("/comm/trace")
    assert response.status_code == status
    assert response.json()["error"]["code"] == code and str(failure) in response.json()["error"]["message"]
