"""The metrics page: documented names and units, correct values, one registry per app."""

import asyncio

import httpx
import pytest
from helpers.server.fake_engine import INFO, FakeEngine, app_for, client_of
from prometheus_client.parser import text_string_to_metric_families

from tightwire.server.api.metrics import METRIC_ALIASES, Metrics
from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import EngineState, Phase
from tightwire.server.ipc.engine_stats import EngineCounters, EngineStats, metric_fields
from tightwire.server.ipc.messages import CommSetup, SelfTestVerdict

BODY = {"prompt": "abc", "max_tokens": 4}


async def _values(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples by name with their labels, without buckets."""
    page = (await client.get("/metrics")).text
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {".".join([sample.name, *sorted(sample.labels.values())]): sample.value for sample in samples}


async def test_one_request_is_counted_and_timed(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={**BODY, "n": 2})
    values = await _values(client)
    assert values["tightwire_requests_total.length"] == 2
    assert values["tightwire_time_to_first_token_seconds_count"] == 2
    assert values["tightwire_inter_token_latency_seconds_count"] == 6
    assert values["tightwire_e2e_request_latency_seconds_count"] == 2
    assert values["tightwire_queue_seconds_count"] == 2
    assert values["tightwire_queue_seconds_sum"] == 0.002
    assert values["tightwire_prompt_tokens_total"] == 6
    assert values["tightwire_generation_tokens_total"] == 8
    assert values["tightwire_prefix_cache_queries_total"] == 100
    assert values["tightwire_prefix_cache_hits_total"] == 40
    assert values["tightwire_drafts_total"] == 10
    assert values["tightwire_draft_tokens_total"] == 30
    assert values["tightwire_accepted_draft_tokens_total"] == 20
    assert values["tightwire_draft_mean_length"] == 2
    assert values["tightwire_tokens_per_sum"] == 8 / 32
    assert values["tightwire_engine_steps_planned_ahead_total"] == 6
    assert values["tightwire_requests_running"] == 0
    assert values["tightwire_kv_cache_usage_ratio"] == 0
    assert values["tightwire_comm_seconds_count.all_reduce.decode.native"] == 32
    assert values["tightwire_comm_bytes_total.all_reduce.decode.native"] == 8000
    assert values["tightwire_comm_exact_bytes_total.all_reduce.decode.native"] == 12000


async def test_vllm_names_have_the_same_values_and_the_models_name(engine: FakeEngine) -> None:
    async with client_of(app_for(engine, http=HttpOptions(metrics_alias="vllm"))) as client:
        await client.post("/v1/completions", json={**BODY, "n": 2})
        page = (await client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name, aliases in METRIC_ALIASES["vllm"].items():
        own = [(sample.name.removeprefix(name), sample.value) for sample in families[name].samples]
        assert own
        for alias in aliases:
            samples = families[alias].samples
            assert [(sample.name.removeprefix(alias), sample.value) for sample in samples] == own
            assert {sample.labels["model_name"] for sample in samples} == {INFO.name}
            assert families[alias].type == families[name].type


async def test_without_the_option_no_name_is_another_servers(client: httpx.AsyncClient) -> None:
    assert "vllm:" not in (await client.get("/metrics")).text


async def test_self_test_results_are_gauges(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    name = "tightwire_comm_selftest_ok"
    assert not any(key.startswith(name) for key in await _values(client))
    verdicts = [SelfTestVerdict("ring", True, "2 sizes"), SelfTestVerdict("flash-int8", False, "off by 3")]
    engine.comm_setup = CommSetup(transport="shared-memory", num_nodes=1, self_test=verdicts)
    values = await _values(client)
    assert (values[f"{name}.ring"], values[f"{name}.flash-int8"]) == (1, 0)


async def test_outcomes(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    before = await _values(client)
    outcomes = ("stop", "length", "cancelled", "error", "refused")
    assert [before[f"tightwire_requests_total.{outcome}"] for outcome in outcomes] == [0] * 5
    await client.post("/v1/completions", json={"prompt": "a", "stop": "l", "max_tokens": 20})
    engine.full = True
    await client.post("/v1/completions", json=BODY)
    engine.full, engine.gives_up = False, "error"
    await client.post("/v1/completions", json=BODY)
    engine.gives_up, engine.dies_after = None, engine.num_outputs + 2
    await client.post("/v1/completions", json={**BODY, "stream": True})
    after = await _values(client)
    assert [after[f"tightwire_requests_total.{outcome}"] for outcome in outcomes] == [1, 0, 0, 2, 1]


async def test_cancelled_request_is_counted_and_its_gauge_returns_to_zero(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.hangs_after = 2
    call = asyncio.create_task(client.post("/v1/completions", json=BODY))
    await asyncio.wait_for(engine.hanging.wait(), timeout=60)
    during = await _values(client)
    assert during["tightwire_requests_running"] == 1
    assert during["tightwire_kv_cache_usage_ratio"] == 0.1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    after = await _values(client)
    assert after["tightwire_requests_running"] == 0
    assert after["tightwire_requests_total.cancelled"] == 1
    assert after["tightwire_e2e_request_latency_seconds_count"] == 0


@pytest.mark.parametrize("escaping", ["", ";escaping=underscores", ";escaping=allow-utf-8"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_samples_of_an_alias_have_its_name_in_every_format(kind: str, escaping: str) -> None:
    accept = f"{kind};version=1.0.0{escaping};q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    page, content_type = Metrics(lambda: None, alias="vllm", model_name=lambda: "m").render(accept)
    assert b'\nvllm:num_requests_running{model_name="m"} 0.0\n' in page
    assert b'\nvllm:e2e_request_latency_seconds_count{model_name="m"} 0.0\n' in page
    assert b"vllm_" not in page
    assert page.endswith(b"# EOF\n") == content_type.startswith("application/openmetrics-text")


async def test_a_request_before_the_server_is_ready_is_counted_as_refused(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state = EngineState(phase=Phase.LOADING, reason="weights 40%")
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503
    assert (await client.get("/v1/models")).status_code == 503
    assert (await _values(client))["tightwire_requests_total.refused"] == 1


async def test_openmetrics_when_asked_for(client: httpx.AsyncClient) -> None:
    plain = await client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_two_apps_in_one_process_have_separate_registries() -> None:
    app_for(FakeEngine())
    app_for(FakeEngine())


def test_before_the_first_step_all_metrics_are_zero() -> None:
    page, _ = Metrics(lambda: None).render("")
    assert b"tightwire_requests_waiting 0.0" in page
    assert b"tightwire_startup_seconds" not in page and b"tightwire_tokens_per_sum" not in page
    assert b"tightwire_kv_cache_usage_ratio 0.0" in page


def test_every_engine_counter_is_a_metric() -> None:
    fields = metric_fields(EngineCounters)
    assert set(fields) == set(EngineCounters.__struct_fields__)
    values = {name: number for number, name in enumerate(fields, start=100)}
    page, _ = Metrics(lambda: EngineStats(counters=EngineCounters(**values))).render("")
    for name, info in fields.items():
        assert f"\ntightwire_{info.name}_total {values[name]}.0\n" in page.decode()


def test_startup_seconds_are_shown() -> None:
    page, _ = Metrics(lambda: None, lambda: 3.25).render("")
    assert "\ntightwire_startup_seconds 3.25\n" in page.decode()
