"""Traces over OTLP: the spans of a request at a collector, what turns them on, what is refused."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of

from tightwire.server.api.request_bodies import CompletionBody
from tightwire.server.api.trace import RequestRecord
from tightwire.server.config.http import wants_traces
from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.check_body import check_fields
from tightwire.server.http.telemetry import Telemetry

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0.5, "stop": ["x"]}


class Collector(HTTPServer):
    requests: list[Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for request in self.requests for each in request.resource_spans for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            assert isinstance(self.server, Collector)
            self.server.requests.append(trace_service.ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def attributes_of(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: plain(each.value) for each in span.attributes}


async def test_spans_of_a_request(collector: Collector, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    made: list[Telemetry] = []

    def make(endpoint: str | None) -> Telemetry:
        made.append(Telemetry(endpoint))
        return made[0]

    monkeypatch.setattr("tightwire.server.http.app.Telemetry", make)
    async with client_of(app_for(engine, http=HttpOptions(otlp_endpoint=collector.url))) as client:
        parent = {"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}
        answer = (await client.post("/v1/chat/completions", json=CHAT, headers=parent)).json()
        await client.get("/v1/models")
        await client.post("/v1/chat/completions", json={})
        engine.gives_up = "error"
        await client.post("/v1/completions", json={"prompt": "a", "model": "tiny"})
    made[0].close()
    by_name = {span.name: span for span in collector.spans}
    assert sorted(by_name) == ["chat tiny", "decode", "prefill", "queue", "text_completion tiny"]
    root = by_name["chat tiny"]
    assert root.trace_id.hex() == "0123456789abcdef0123456789abcdef"
    assert root.parent_span_id.hex() == "0123456789abcdef"
    attributes = attributes_of(root)
    assert 0 < attributes.pop("gen_ai.server.time_to_first_token") < 60
    assert attributes.pop("tightwire.request.id")
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tightwire",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ["x"],
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    queue, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {root.span_id}
    ends = [root.start_time_unix_nano, queue.start_time_unix_nano, prefill.start_time_unix_nano]
    ends += [decode.start_time_unix_nano, decode.end_time_unix_nano, root.end_time_unix_nano]
    assert ends == sorted(ends)
    failed = by_name["text_completion tiny"]
    assert attributes_of(failed)["error.type"] == "500" and failed.status.code == 2
    resource = collector.requests[0].resource_spans[0].resource
    assert attributes_of(resource)["service.name"] == "tightwire"


def test_what_turns_traces_on() -> None:
    assert not wants_traces(None, {})
    assert wants_traces("http://a:4318", {})
    assert wants_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"})
    assert not wants_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_TRACES_EXPORTER": "none"})
    with pytest.raises(ValueError, match="PROTOCOL is 'grpc'; this server sends http/protobuf only"):
        wants_traces("http://a:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_without_the_packages_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(
        ValueError, match=r"--otlp-endpoint needs OpenTelemetry; pip install opentelemetry-exporter-otlp-proto-http"
    ):
        wants_traces("http://a:4318", {})


@pytest.mark.parametrize(
    ("status", "reason", "failure", "code"),
    [(200, "stop", None, 0), (200, "error", "error", 2), (200, "cancelled", "cancelled", 0), (500, "error", "500", 2)],
)
def test_a_stream_that_broke_is_an_error_though_its_status_is_200(
    collector: Collector, status: int, reason: str, failure: str | None, code: int
) -> None:
    telemetry = Telemetry(collector.url)
    record = RequestRecord(id="a", method="POST", path="/v1/completions", status=status, finish_reasons=[reason])
    record.asked = check_fields({"prompt": "a", "stream": True}, CompletionBody)
    record.ended_s = record.arrived_s + 1
    telemetry(record, {})
    telemetry.close()
    [span] = collector.spans
    assert (attributes_of(span).get("error.type"), span.status.code) == (failure, code)


def test_a_collector_that_does_not_answer_hardly_delays_the_exit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = (
            "from tightwire.server.api.request_bodies import CompletionBody\n"
            "from tightwire.server.api.trace import RequestRecord\n"
            "from tightwire.server.http.telemetry import Telemetry\n"
            "import time\n"
            f"telemetry = Telemetry('http://127.0.0.1:{silent.getsockname()[1]}')\n"
            "record = RequestRecord(id='a', method='POST', path='/v1/completions', ended_s=time.monotonic())\n"
            "record.asked = CompletionBody(prompt=['a'])\n"
            "telemetry(record, {})\n"
            "print(time.time())\n"
            "telemetry.close()\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        seconds = time.time() - float(ended.stdout)
    assert seconds < 7  # the exporter alone waits 10 s for an answer


def test_an_unreachable_collector_costs_the_request_nothing() -> None:
    telemetry = Telemetry("http://127.0.0.1:1")
    telemetry(RequestRecord(id="a", method="POST", path="/v1/completions"), {})
