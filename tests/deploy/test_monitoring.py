"""Dashboard, alerts, Prometheus' configuration and routers' files: valid, and naming only metrics that a server has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.server.fake_engine import FakeEngine, app_for, client_of
from prometheus_client.parser import text_string_to_metric_families

from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.messages import CommSetup, SelfTestVerdict

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "helm" / "monitoring" / "rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "helm" / "monitoring" / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
METRIC = re.compile(r"\b(?:tightwire_|vllm:)[a-z0-9_]*[a-z0-9]")
# What vllm-project/production-stack reads (src/vllm_router/stats/engine_stats.py).
PRODUCTION_STACK = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
}


def expressions() -> Iterator[str]:
    """Every query of the dashboard and the alerts."""
    yield from (target["expr"] for panel in PANELS for target in panel["targets"])
    rules = yaml.safe_load(RULES.read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


async def names_on_the_metrics_page() -> set[str]:
    """Sample names after one request, with vLLM's names."""
    engine = FakeEngine()
    engine.comm_setup = CommSetup(transport="shared-memory", num_nodes=1, self_test=[SelfTestVerdict("ring", True, "")])
    async with client_of(app_for(engine, http=HttpOptions(metrics_alias="vllm"))) as client:
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        page = (await client.get("/metrics")).text
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


async def test_every_metric_that_is_named_exists() -> None:
    picker = (DEPLOY / "routers" / "llm-d-epp.yaml").read_text()
    named = {name for text in [*expressions(), picker] for name in METRIC.findall(text)}
    assert len(named) > 15
    assert (named | PRODUCTION_STACK) - await names_on_the_metrics_page() == set()


def test_queries_are_promql() -> None:
    promql = pytest.importorskip("promql_parser", reason="needs promql-parser (in the dev extra)")
    for text in expressions():
        promql.parse(text.replace("$__rate_interval", "1m").replace("$instance", "a"))
    with pytest.raises(ValueError):
        promql.parse("rate(tightwire_requests_total)[5m")


def test_every_panel_uses_the_data_source_variable_and_has_its_own_place() -> None:
    variables: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = [part["datasource"] for panel in PANELS for part in [panel, *panel["targets"]]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert variables["instance"]["datasource"]["uid"] == "${datasource}"
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS]
    assert len(set(places)) == len({panel["id"] for panel in PANELS}) == len(PANELS) == 12
    # A fixed short uid, and no id: Grafana then updates the board instead of adding another.
    assert (DASHBOARD["id"], DASHBOARD["uid"]) == (None, "tightwire") and DASHBOARD["schemaVersion"] <= 41


def test_latencies_are_quantiles_of_histograms() -> None:
    buckets = [text for text in expressions() if "_bucket" in text]
    assert len(buckets) >= 12
    assert all(re.match(r"histogram_quantile\(0?\.\d+, sum by \(le[a-z, ]*\) \(rate\(", text) for text in buckets)


def test_the_endpoint_pickers_plugins_are_declared_before_they_are_used() -> None:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "routers" / "llm-d-epp.yaml").read_text())
    declared = {plugin["type"] for plugin in config["plugins"]}
    used = {entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]}
    for source in config["dataLayer"]["sources"]:
        used |= {source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])}
    assert used <= declared


def test_prometheus_accepts_its_configuration_and_the_alerts(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian: the package prometheus)")
    config = (DEPLOY / "prometheus.yml").read_text()
    assert "rule_files: [/etc/prometheus/rules.yml]" in config
    (tmp_path / "prometheus.yml").write_text(config.replace("/etc/prometheus/rules.yml", str(RULES)))
    checked = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0 and "5 rules found" in checked.stdout, checked.stdout + checked.stderr


def test_prometheus_scrapes_the_name_that_compose_gives_the_servers() -> None:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    target: str = config["scrape_configs"][0]["static_configs"][0]["targets"][0]
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("cpu", "cuda"):
        assert services[name]["networks"]["default"]["aliases"] == [target.removesuffix(":8000")]
