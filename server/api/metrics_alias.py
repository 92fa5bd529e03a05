"""Adds a second name to metrics on /metrics, for routers and dashboards that read the names of another server."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

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


@dataclass(frozen=True, eq=False)  # a registry finds its collectors by identity
class AliasedMetrics(Collector):
    """The metrics of ``source``, and those with an alias once more under each alias, labelled with the model's name."""

    source: CollectorRegistry
    aliases: Mapping[str, tuple[str, ...]]
    model_name: Callable[[], str | None]

    def collect(self) -> Iterator[Metric]:
        labels = {"model_name": self.model_name() or ""}
        for family in self.source.collect():
            yield family
            for alias in self.aliases.get(family.name, ()):
                renamed = Metric(alias, f"Same as {family.name}: {family.documentation}", family.type)
                for sample in family.samples:
                    name = alias + sample.name.removeprefix(family.name)  # _total, _bucket, _sum, _count, _created
                    renamed.samples.append(sample._replace(name=name, labels={**sample.labels, **labels}))
                yield renamed
