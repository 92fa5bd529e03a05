"""Sends a trace of each generation request to an OpenTelemetry collector: a span of the request, its queue, prefill and decode.

Names and attributes follow OpenTelemetry's conventions for generative AI. The spans are made after the response, from moments
that ``/metrics`` needs anyway.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tightwire import __version__
from tightwire.server.api.trace import RequestRecord

_OPERATIONS = {"/v1/completions": "text_completion"}  # others are chats
# Fields of a request by the convention's name; a field that has its default is left out.
_SAME = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
_ASKED = {"max_tokens": "token_limit", "choice.count": "n", "stop_sequences": "stop"} | {name: name for name in _SAME}
_LAST_SPANS_S = 2.0


class Telemetry:
    """Makes spans. Its exporter sends them in batches from a thread; ``close`` sends the last ones."""

    def __init__(self, endpoint: str | None) -> None:
        """``endpoint``: the collector's address; None takes that of the OTEL_* variables."""
        from opentelemetry import propagate, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # As the SDK does with the variable for all signals; a whole address keeps its path.
        url = None if endpoint is None else f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
        attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "tightwire"}
        resource = Resource.create({**attributes, "service.version": __version__})
        self._provider = provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._extract, self._trace = propagate.extract, trace
        self._tracer = provider.get_tracer("tightwire", __version__)

    def close(self) -> None:
        """Send the last spans, for 2 s at most: a collector that does not answer must not delay the exit."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_SPANS_S)

    def __call__(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        if record.asked is None:
            return  # it generated nothing: a list of models, a wrong key, an invalid body
        trace = self._trace
        operation, kind = _OPERATIONS.get(record.path, "chat"), trace.SpanKind.SERVER
        found, begun = {"gen_ai.operation.name": operation, **_attributes(record)}, _ns(record, record.arrived_s)
        name, parent = f"{operation} {record.model}", self._extract(headers)
        root = self._tracer.start_span(name, parent, kind=kind, attributes=found, start_time=begun)
        if record.status is None or record.status >= 500 or "error" in record.finish_reasons:
            root.set_status(trace.Status(trace.StatusCode.ERROR))
        inside = trace.set_span_in_context(root)
        for name, start_s, end_s in _phases(record):
            self._tracer.start_span(name, inside, start_time=_ns(record, start_s)).end(_ns(record, end_s))
        assert record.ended_s is not None, "records are complete when they come here"
        root.end(_ns(record, record.ended_s))


def _attributes(record: RequestRecord) -> dict[str, Any]:
    asked, tokens = record.asked, record.count_tokens()
    found: dict[str, Any] = {
        "gen_ai.provider.name": "tightwire",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": asked.model or record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.answer,
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "tightwire.request.id": record.id,
        "tightwire.api_key.name": record.key,
    }
    if record.first_token_s is not None:
        found["gen_ai.server.time_to_first_token"] = record.first_token_s - record.arrived_s
    for name, field in _ASKED.items():
        value = getattr(asked, field)
        known = type(asked).model_fields.get(field)  # none for token_limit
        if value != (known and known.get_default(call_default_factory=True)):
            found[f"gen_ai.request.{name}"] = value
    failures = [str(record.status)] if record.status is not None and record.status >= 400 else []
    failures += (reason for reason in record.finish_reasons if reason not in ("stop", "length"))
    found["error.type"] = next(iter(failures), None)
    return {name: value for name, value in found.items() if value is not None}


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """The parts of the request in the engine, as far as it came."""
    moments = [record.submitted_s, record.scheduled_s, record.sampled_s, record.last_token_s]
    for name, start_s, end_s in zip(("queue", "prefill", "decode"), moments[:-1], moments[1:], strict=True):
        if start_s is None or end_s is None:
            return
        yield name, start_s, max(start_s, end_s)


def _ns(record: RequestRecord, moment_s: float) -> int:
    return int((record.arrived_unix_s + moment_s - record.arrived_s) * 1e9)
