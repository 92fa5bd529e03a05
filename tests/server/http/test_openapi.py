"""/openapi.json is correct: requests generated from it never cause a 5xx, and every answer matches it."""

from typing import Any

import pytest
import schemathesis
from helpers.server.fake_engine import FakeEngine, app_for
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

_app: Any = app_for(FakeEngine())
schema = schemathesis.openapi.from_asgi("/openapi.json", _app)


@schema.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Drop generated model names: they never match, and nothing after that check would be tested."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "tiny"
    return body


_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_ADAPTED = "^/v1/(responses|messages)"  # large bodies; tests/suites/http/test_odd_bodies.py tries more of them
_settings = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@schema.exclude(path_regex=_ADAPTED).parametrize()
@settings(_settings, max_examples=40)
def test_generated_requests(case: Case) -> None:
    case.call_and_validate(checks=_CHECKS)


@schema.include(path_regex=_ADAPTED).parametrize()
@settings(_settings, max_examples=15)
def test_generated_requests_of_adapted_apis(case: Case) -> None:
    case.call_and_validate(checks=_CHECKS)


def test_every_route_and_error_is_described() -> None:
    page = _app.openapi()
    assert set(page["paths"]) == {
        "/",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/version",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/comm",
        "/comm/trace",
    }
    responses = page["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "404", "413", "415", "429", "500", "503"}
    assert responses["429"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


@pytest.mark.parametrize(
    "name", ["ChatBody", "CompletionBody", "ErrorBody", "MessagesErrorBody", "ChatCompletion", "Completion", "Usage"]
)
def test_schemas_are_in_the_page(name: str) -> None:
    assert name in _app.openapi()["components"]["schemas"]
