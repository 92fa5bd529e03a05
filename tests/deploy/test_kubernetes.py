"""The Helm chart and the LeaderWorkerSet manifest: linted and rendered by Helm's own code, checked against Kubernetes' schemas."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tightwire.server.config import flags
from tightwire.server.config.hosts import HostOptions
from tightwire.server.config.http import HttpOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
EVERYTHING: dict[str, Any] = {
    "hosts": 2,
    "tp": 4,
    "gpus": 2,
    "metricsAlias": "vllm",
    "args": ["--max-model-len", "4096"],
    "env": [{"name": "HF_TOKEN", "value": "x"}],
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
    "apiKeySecret": "key",
    "commSecret": "ranks",
    "cacheClaim": "models",
    "serviceMonitor": True,
    "alerts": True,
    "dashboard": True,
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
}
# Kubernetes' schemas do not hold this resource; its fields: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1
GROUP_FIELDS = {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"}
RESTART_POLICIES = {"RecreateGroupOnPodRestart", "None"}

chart_of = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk (in the dev extra, on x86-64 Linux)")
schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (in the dev extra)")


def render(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifests by kind."""
    files: dict[str, str] = chart_of.Chart.load(CHART).render(values, name="demo")
    manifests = [manifest for text in files.values() for manifest in yaml.safe_load_all(text) if manifest]
    return {manifest["kind"]: manifest for manifest in manifests}


def check(manifest: dict[str, Any]) -> None:
    """Raise if Kubernetes would refuse a manifest, or ignore one of its fields."""
    if manifest["kind"] == "LeaderWorkerSet":
        assert manifest["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
        assert manifest["spec"].keys() == {"replicas", "leaderWorkerTemplate"}
        group: dict[str, Any] = manifest["spec"]["leaderWorkerTemplate"]
        assert group.keys() <= GROUP_FIELDS and group["restartPolicy"] in RESTART_POLICIES
        manifest = {"apiVersion": "v1", "kind": "Pod", **group["workerTemplate"]}
    schemas.validate(manifest, "1.32", strict=True)


def container_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec = manifest["spec"]
    template = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]
    return template["spec"]["containers"][0]


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_helm_finds_no_fault(values: dict[str, Any]) -> None:
    report = chart_of.lint(str(CHART), values, strict=True)
    assert [message for message in report["messages"] if message["severity"] > 1] == [] == report["errors"]


def test_a_replica_on_one_host_is_a_pod_of_a_deployment() -> None:
    manifests = render({"replicas": 3})
    assert manifests.keys() == {"Deployment", "Service"}
    for manifest in manifests.values():
        check(manifest)
    assert manifests["Deployment"]["spec"]["replicas"] == 3
    pod = manifests["Deployment"]["spec"]["template"]
    assert manifests["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_a_replica_on_several_hosts_is_a_leader_worker_set() -> None:
    manifests = render(EVERYTHING)
    assert manifests.keys() == {"LeaderWorkerSet", "Service", "ServiceMonitor", "PrometheusRule", "ConfigMap"}
    for kind in ("LeaderWorkerSet", "Service", "ConfigMap"):
        check(manifests[kind])
    selector = manifests["Service"]["spec"]["selector"]
    assert selector.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    group = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2 and selector.items() <= group["workerTemplate"]["metadata"]["labels"].items()
    # LeaderWorkerSet makes a Service with its own name.
    assert manifests["Service"]["metadata"]["name"] != manifests["LeaderWorkerSet"]["metadata"]["name"]
    assert (
        manifests["ServiceMonitor"]["spec"]["endpoints"][0]["port"] == manifests["Service"]["spec"]["ports"][0]["name"]
    )
    rules = yaml.safe_load((CHART / "monitoring" / "rules.yml").read_text())
    assert manifests["PrometheusRule"]["spec"] == rules
    assert manifests["ConfigMap"]["data"]["tightwire.json"] == (CHART / "monitoring" / "dashboard.json").read_text()


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_chart_starts_servers_with_valid_flags_and_probes(values: dict[str, Any]) -> None:
    manifests = render(values)
    container = container_of(manifests.get("Deployment") or manifests["LeaderWorkerSet"])
    assert container["args"][0] == "serve"
    config = flags.parse(flags.make_parser("serve", "Serve."), container["args"][1:])[0]
    assert (config.parallel.tp, config.model.device) == ((4, "cuda") if values else (2, "cpu"))
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert config.parallel.comm_secret_file == ("/run/tightwire/secret" if values else None)
    assert ("/run/tightwire" in mounts) == bool(values)
    assert config.hosts.join_timeout_s == (600 if values else HostOptions().join_timeout_s)
    assert container["ports"][0]["containerPort"] == config.http.port
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 600


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tpp": 2}, "'tpp' not allowed"),
        ({"hosts": 0}, "/hosts"),
        ({"tp": "two"}, "/tp"),
        ({"service": {"type": "Ingress"}}, "/service/type"),
        ({"tp": 3, "hosts": 2}, r"tp \(3\) must be a multiple of hosts \(2\)"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], reason: str) -> None:
    chart = chart_of.Chart.load(CHART)
    with pytest.raises(Exception, match=reason):
        chart.validate_schema(values)
        chart.render(values, name="demo")


def test_the_plain_leader_worker_set_is_valid() -> None:
    group, service = yaml.safe_load_all((DEPLOY / "lws" / "two-hosts.yaml").read_text())
    check(group)
    check(service)
    assert service["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": group["metadata"]["name"],
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }


@pytest.mark.parametrize("hosts", [1, 2, None])
def test_a_pod_takes_requests_while_proxies_learn_of_its_end_and_then_has_time_to_finish_them(
    hosts: int | None,
) -> None:
    if hosts is None:
        manifest = next(yaml.safe_load_all((DEPLOY / "lws" / "two-hosts.yaml").read_text()))
    else:
        manifest = render({"hosts": hosts, "tp": 2})["Deployment" if hosts == 1 else "LeaderWorkerSet"]
    spec = manifest["spec"]
    pod = (spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"])["spec"]
    sleep, seconds = container_of(manifest)["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep" and float(seconds) >= 5
    assert pod["terminationGracePeriodSeconds"] >= float(seconds) + HttpOptions().shutdown_grace_s + 5


def test_an_unknown_field_in_a_pod_is_a_fault() -> None:
    group = next(yaml.safe_load_all((DEPLOY / "lws" / "two-hosts.yaml").read_text()))
    container_of(group)["startupProb"] = {}
    with pytest.raises(schemas.ValidationError, match="startupProb"):
        check(group)
