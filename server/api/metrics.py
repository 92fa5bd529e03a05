"""Renders /metrics from request traces and the engine's newest counters and gauges. Each app has its own registry.

``--metrics-alias`` adds a second name to some metrics, for routers and dashboards that read the names of another server.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tightwire.comm.ledger.ledger import Count
from tightwire.server.ipc.engine_stats import EngineStats, ReplicaLoad, metric_fields
from tightwire.server.ipc.messages import CommSetup

# Seconds. A laptop takes 0.1 s per token and a minute per answer; a GPU is a hundred times faster.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)

_USAGE_HELP = "KV cache blocks in use, 0 to 1"

_TTFT_PARTS = ("http", "tokenize", "queue", "compute", "allreduce", "codec", "sampling", "engine", "send")

# vLLM renamed some metrics; routers and dashboards in use read the older names or the newer ones.
METRIC_ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "none": {},
    "vllm": {
        "tightwire_requests_running": ("vllm:num_requests_running",),
        "tightwire_requests_waiting": ("vllm:num_requests_waiting",),
        "tightwire_kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "tightwire_prefix_cache_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        "tightwire_prefix_cache_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        "tightwire_prompt_tokens": ("vllm:prompt_tokens",),
        "tightwire_generation_tokens": ("vllm:generation_tokens",),
        "tightwire_preemptions": ("vllm:num_preemptions",),
        "tightwire_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
        "tightwire_inter_token_latency_seconds": (
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
        ),
        "tightwire_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
        "tightwire_queue_seconds": ("vllm:request_queue_time_seconds",),
    },
}


class Metrics(Collector):
    """``outcome`` of a sequence: stop, length, cancelled, error, or refused (queue full, not ready)."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        startup_s: Callable[[], float | None] = lambda: None,
        comm_setup: Callable[[], CommSetup | None] = lambda: None,
        alias: str = "none",
        model_name: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._stats, self._startup_s, self._comm_setup = stats, startup_s, comm_setup
        self._aliases, self._model_name = METRIC_ALIASES[alias], model_name
        self.registry, self._page = CollectorRegistry(), CollectorRegistry()
        self._page.register(self)
        self.time_to_first_token = self._timer("time_to_first_token", "From the request's arrival to its first token")
        self.inter_token_latency = self._timer("inter_token_latency", "Between tokens of a sequence", _TOKEN_BUCKETS)
        self.e2e_latency = self._timer("e2e_request_latency", "From the request's arrival to its last token")
        self.queue_time = self._timer("queue", "From arrival at the engine to the first scheduled step")
        parts = "Parts of the time to the first token, for requests whose first text was sent"
        name = "tightwire_time_to_first_token_part_seconds"
        self._ttft_parts = Summary(name, parts, ["part"], registry=self.registry)
        for part in _TTFT_PARTS:
            self._ttft_parts.labels(part)
        self.requests = self._counter("requests", "Sequences ended, by outcome", "outcome")
        for outcome in ("stop", "length", "cancelled", "error", "refused"):
            self.requests.labels(outcome)  # present from the start, so that a rate can be computed
        of_key = "POST requests by the name of their API key: accepted, or refused at one of its limits"
        self.key_requests = self._counter("key_requests", of_key, "key", "outcome")
        self.key_tokens = self._counter("key_tokens", "Tokens of prompts and answers by API key", "key", "kind")

    def observe_ttft(self, timing: Mapping[str, float | None]) -> None:
        """Add the parts of one request's ``Timing``; unknown parts are left out."""
        for part in _TTFT_PARTS:
            if (seconds := timing[f"{part}_s"]) is not None:
                self._ttft_parts.labels(part).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """All metrics, and those with an alias once more under each alias, labelled with the model's name."""
        labels = {"model_name": self._model_name() or ""}
        engine = _snapshot(self._stats() or EngineStats(), self._startup_s(), self._comm_setup())
        for family in chain(self.registry.collect(), engine):
            yield family
            for alias in self._aliases.get(family.name, ()):
                renamed = Metric(alias, f"Same as {family.name}: {family.documentation}", family.type)
                for sample in family.samples:
                    name = alias + sample.name.removeprefix(family.name)  # _total, _bucket, _sum, _count, _created
                    renamed.samples.append(sample._replace(name=name, labels={**sample.labels, **labels}))
                yield renamed

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, chosen by the scraper's Accept header."""
        encode, content_type = choose_encoder(accept)
        if self._aliases and "openmetrics" in content_type and "allow-utf-8" not in content_type:
            # Its encoder writes the colon of an alias as an underscore, but not in the line with the type.
            encode, content_type = choose_encoder("")
        return encode(self._page), content_type

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"tightwire_{name}", help, labels, registry=self.registry)

    def _timer(self, name: str, help: str, buckets: tuple[float, ...] = _REQUEST_BUCKETS) -> Histogram:
        return Histogram(f"tightwire_{name}_seconds", help, buckets=buckets, registry=self.registry)


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


def _snapshot(stats: EngineStats, startup_s: float | None, setup: CommSetup | None) -> Iterator[Metric]:
    for struct in (stats.total, stats.counters, stats.drafts, stats.stream, stats.kv_offload):
        for field, (kind, name, help) in metric_fields(type(struct)).items():
            if (value := getattr(struct, field)) is not None:
                yield _FAMILIES[kind](f"tightwire_{name}", help, value)
    yield GaugeMetricFamily("tightwire_kv_cache_usage_ratio", _USAGE_HELP, _kv_usage(stats.total))
    if len(stats.loads) > 1:
        for field, (_, name, help) in metric_fields(ReplicaLoad).items():
            yield _by_replica(name, help, [getattr(load, field) for load in stats.loads])
        yield _by_replica("kv_cache_usage_ratio", _USAGE_HELP, map(_kv_usage, stats.loads))
    yield from _comm_metrics(stats.comm)
    if startup_s is not None:
        yield GaugeMetricFamily("tightwire_startup_seconds", "From the process's start to ready", startup_s)
    ok = "1: the AllReduce gave the right sum at start-up; 0: it did not and is never used"
    self_test = GaugeMetricFamily("tightwire_comm_selftest_ok", ok, labels=["algorithm"])
    for verdict in setup.self_test if setup else []:
        self_test.add_metric([verdict.algorithm], float(verdict.ok))
    yield self_test


def _by_replica(name: str, help: str, values: Iterable[float]) -> Metric:
    family = GaugeMetricFamily(f"tightwire_replica_{name}", f"{help}, by replica", labels=["replica"])
    for replica, value in enumerate(values):
        family.add_metric([str(replica)], value)
    return family


def _kv_usage(load: ReplicaLoad) -> float:
    return (load.num_blocks - load.num_free_blocks) / load.num_blocks if load.num_blocks else 0.0


def _comm_metrics(counts: Iterable[Count]) -> Iterator[Metric]:
    labels = ["op", "algorithm", "phase"]
    seconds = SummaryMetricFamily("tightwire_comm_seconds", "Time of rank 0 in collectives, and calls", labels=labels)
    sent = CounterMetricFamily("tightwire_comm_bytes", "Bytes rank 0 sent in collectives", labels=labels)
    unquantized = "Bytes rank 0 would have sent with nothing quantized"
    exact = CounterMetricFamily("tightwire_comm_exact_bytes", unquantized, labels=labels)
    for count in counts:
        values = [count.op, count.algorithm, count.phase]
        seconds.add_metric(values, count_value=count.calls, sum_value=count.seconds)
        sent.add_metric(values, count.bytes_sent)
        exact.add_metric(values, count.exact_bytes)
    yield from (seconds, sent, exact)
