"""/openapi.json is correct: requests generated from it never cause a 5xx, and every answer matches it.

Schemathesis takes a second to import. Every worker imports this file, so the two tests that need it import it themselves.
"""

from typing import TYPE_CHECKING, Any

import pytest
from helpers.server.fake_engine import FakeEngine, app_for
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from schemathesis import Case, HookContext
    from schemathesis.schemas import BaseSchema

_ADAPTED = "^/v1/(responses|messages)"  # large bodies; tests/suites/http/test_odd_bodies.py tries more of them
_settings = settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def app() -> Any:
    return app_for(FakeEngine())


def _schema(app: Any) -> "BaseSchema":
    import schemathesis

    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @schema.hook
    def map_body(context: "HookContext", body: Any) -> Any:
        """Drop generated model names: they never match, and nothing after that check would be tested."""
        if isinstance(body, dict) and isinstance(body.get("model"), str):
            body["model"] = "tiny"
        return body

    return schema


def test_generated_requests(app: Any, subtests: pytest.Subtests) -> None:
    """Not ``schema.parametrize()``, which makes its cases, in seconds, whenever tests are collected."""
    schema = _schema(app)
    bodies: Any = schema.raw_schema["components"]["schemas"]
    chat, completion = (bodies[name]["properties"] for name in ("ChatBody", "CompletionBody"))
    for name in chat.keys() & completion.keys():  # of the same class; chats try all that its fields may be
        if chat[name] == completion[name] and name != "model":
            del completion[name]
    _run_each(schema.exclude(path_regex=_ADAPTED), 15, subtests)


def test_generated_requests_of_adapted_apis(app: Any, subtests: pytest.Subtests) -> None:
    """Drawn ones only: making two thousand cases, some for each keyword of these large bodies, takes seconds."""
    schema = _schema(app)
    schema.config.phases.coverage.enabled = False
    _run_each(schema.include(path_regex=_ADAPTED), 20, subtests)


def _run_each(schema: "BaseSchema", max_examples: int, subtests: pytest.Subtests) -> None:
    from schemathesis.checks import load_all_checks, not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.pytest.lazy import get_all_tests
    from schemathesis.specs.openapi import checks

    matches = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]

    @settings(_settings, max_examples=max_examples)
    def check(case: "Case") -> None:
        case.call_and_validate(checks=[not_a_server_error, *matches])

    load_all_checks()
    tests = list(get_all_tests(schema=schema, test_func=check, settings=None, given_kwargs=None))
    assert tests
    for each in tests:
        assert isinstance(each, Ok), each
        operation, run = each.ok()
        with subtests.test(operation.label):
            run()


def test_every_route_and_error_is_described(app: Any) -> None:
    page = app.openapi()
    assert set(page["paths"]) == {
        "/",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
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
def test_schemas_are_in_the_page(name: str, app: Any) -> None:
    assert name in app.openapi()["components"]["schemas"]
