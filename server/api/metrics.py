"""What Prometheus reads: latencies observed where they happen, engine gauges read from its newest counters.

Each app has a registry of its own, so two apps in one process (tests) do not meet.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tightwire.server.api.responses import Timing
from tightwire.server.ipc.messages import CacheCount, CommSetup, EngineStats, StreamCount

# Seconds. A laptop takes 0.1 s per token and a minute per answer; a GPU is a hundred times faster.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)

_TTFT_PARTS = ("http", "tokenize", "queue", "compute", "allreduce", "codec", "sampling", "engine", "send")


class Metrics:
    """``outcome`` of a sequence: stop, length, cancelled, error, or refused (queue full, not ready)."""

    def __init__(
        self,
        stats: Callable[[], EngineStats | None],
        startup_s: Callable[[], float | None] = lambda: None,
        comm_setup: Callable[[], CommSetup | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "tightwire_time_to_first_token_seconds", "From the request's arrival to its first token", _REQUEST_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "tightwire_inter_token_latency_seconds", "Between one token of a sequence and the next", _TOKEN_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "tightwire_e2e_request_latency_seconds", "From the request's arrival to its last token", _REQUEST_BUCKETS
        )
        self.queue_time = self._histogram(
            "tightwire_queue_seconds", "From arrival at the engine to the first scheduled step", _REQUEST_BUCKETS
        )
        self._ttft_parts = Summary(
            "tightwire_time_to_first_token_part_seconds",
            "Where the time to the first token went, of requests whose first text was sent",
            ["part"],
            registry=self.registry,
        )
        for part in _TTFT_PARTS:
            self._ttft_parts.labels(part)
        self.requests = Counter(
            "tightwire_requests", "Sequences ended, by outcome", ["outcome"], registry=self.registry
        )
        for outcome in ("stop", "length", "cancelled", "error", "refused"):
            self.requests.labels(outcome)  # present from the start, so that a rate can be taken
        self.registry.register(_EngineCollector(stats))
        self.registry.register(_StartupCollector(startup_s))
        self.registry.register(_SelfTestCollector(comm_setup))

    def observe_ttft(self, timing: Timing) -> None:
        """Sum up one request's parts; one that is not known counts nowhere."""
        for part in _TTFT_PARTS:
            seconds = getattr(timing, f"{part}_s")
            if seconds is not None:
                self._ttft_parts.labels(part).observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as the scraper's Accept header wants it."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, buckets=buckets, registry=self.registry)


class SequenceTimer:
    """Observes one sequence from arrival to end; ``end`` counts once, the first outcome stands."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s  # on the clock of time.monotonic
        self._last_token_s: float | None = None
        self._ended = False

    def saw_tokens(self, count: int, queue_s: float | None) -> None:
        now_s = time.monotonic()
        if queue_s is not None:
            self._metrics.queue_time.observe(queue_s)
        if not count:
            return
        if self._last_token_s is None:
            self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
        else:
            self._metrics.inter_token_latency.observe((now_s - self._last_token_s) / count)
        self._last_token_s = now_s

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self._metrics.e2e_latency.observe(time.monotonic() - self._arrived_s)


class _EngineCollector(Collector):
    """Reads the engine's counters when scraped; an engine before its first step is at zero."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats() or EngineStats(
            num_running=0,
            num_waiting=0,
            num_blocks=0,
            num_free_blocks=0,
            num_steps=0,
            num_preemptions=0,
            num_prompt_tokens=0,
            num_generation_tokens=0,
        )
        used = (stats.num_blocks - stats.num_free_blocks) / stats.num_blocks if stats.num_blocks else 0.0
        yield GaugeMetricFamily("tightwire_requests_running", "Sequences in the running batch", stats.num_running)
        yield GaugeMetricFamily("tightwire_requests_waiting", "Sequences waiting for a place", stats.num_waiting)
        yield GaugeMetricFamily("tightwire_kv_cache_usage_ratio", "KV cache blocks in use, 0 to 1", used)
        yield CounterMetricFamily("tightwire_engine_steps", "Forward passes", stats.num_steps)
        yield CounterMetricFamily(
            "tightwire_engine_steps_planned_ahead", "Of these, planned while the last one ran", stats.num_steps_ahead
        )
        yield CounterMetricFamily(
            "tightwire_prompt_tokens", "Prompt tokens of sequences that began to answer", stats.num_prompt_tokens
        )
        yield CounterMetricFamily("tightwire_generation_tokens", "Tokens sampled", stats.num_generation_tokens)
        yield CounterMetricFamily(
            "tightwire_preemptions", "Sequences put back for want of blocks", stats.num_preemptions
        )
        yield CounterMetricFamily(
            "tightwire_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.num_prefix_queried_tokens,
        )
        yield CounterMetricFamily(
            "tightwire_prefix_cache_hits", "Prompt tokens found there, not computed again", stats.num_prefix_hit_tokens
        )
        yield CounterMetricFamily("tightwire_draft_tokens", "Tokens guessed ahead", stats.num_draft_tokens)
        yield CounterMetricFamily(
            "tightwire_accepted_draft_tokens", "Guessed tokens that held", stats.num_accepted_draft_tokens
        )
        if stats.replicas:
            yield from _replica_metrics(stats)
        if stats.stream is not None:
            yield from _stream_metrics(stats.stream)
        if stats.kv_offload is not None:
            yield from _offload_metrics(stats.kv_offload)
        yield from _comm_metrics(stats)


def _stream_metrics(stream: StreamCount) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "tightwire_weight_stream_bytes", "Bytes of streamed layers that have come to rank 0", stream.num_bytes
    )
    yield CounterMetricFamily(
        "tightwire_weight_fetch_seconds", "Time that their way took, most of it beside computing", stream.fetch_s
    )
    yield CounterMetricFamily(
        "tightwire_weight_wait_seconds", "Time that steps stood still for want of a layer", stream.waited_s
    )
    yield GaugeMetricFamily("tightwire_step_tokens_limit", "Tokens that a step may take now", stream.step_tokens)


def _offload_metrics(count: CacheCount) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "tightwire_kv_offload_bytes", "Bytes of keys and values from the host to rank 0 and back", count.num_bytes
    )
    yield CounterMetricFamily(
        "tightwire_kv_offload_wait_seconds", "Time that steps stood still for want of them", count.waited_s
    )


class _StartupCollector(Collector):
    """One gauge, absent until the server is ready."""

    def __init__(self, startup_s: Callable[[], float | None]) -> None:
        self._startup_s = startup_s

    def collect(self) -> Iterator[Metric]:
        seconds = self._startup_s()
        if seconds is not None:
            yield GaugeMetricFamily("tightwire_startup_seconds", "From the process's start to ready", seconds)


class _SelfTestCollector(Collector):
    """A gauge for each AllReduce that the start-up check has seen; none until the ranks are ready."""

    def __init__(self, comm_setup: Callable[[], CommSetup | None]) -> None:
        self._comm_setup = comm_setup

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "tightwire_comm_selftest_ok",
            "1: the AllReduce gave the right sum at start-up; 0: it did not and is never used",
            labels=["algorithm"],
        )
        setup = self._comm_setup()
        for verdict in setup.self_test if setup else []:
            family.add_metric([verdict.algorithm], float(verdict.ok))
        yield family


def _replica_metrics(stats: EngineStats) -> Iterator[Metric]:
    running, waiting, usage = (
        GaugeMetricFamily(f"tightwire_replica_{name}", f"{help}, by replica", labels=["replica"])
        for name, help in (
            ("requests_running", "Sequences in the running batch"),
            ("requests_waiting", "Sequences waiting for a place"),
            ("kv_cache_usage_ratio", "KV cache blocks in use, 0 to 1"),
        )
    )
    for number, replica in enumerate(stats.replicas):
        running.add_metric([str(number)], replica.num_running)
        waiting.add_metric([str(number)], replica.num_waiting)
        usage.add_metric([str(number)], 1 - replica.num_free_blocks / replica.num_blocks)
    yield from (running, waiting, usage)


def _comm_metrics(stats: EngineStats) -> Iterator[Metric]:
    labels = ["op", "algorithm", "phase"]
    seconds = SummaryMetricFamily("tightwire_comm_seconds", "Time of rank 0 in collectives, and calls", labels=labels)
    sent = CounterMetricFamily("tightwire_comm_bytes", "Bytes rank 0 sent in collectives", labels=labels)
    exact = CounterMetricFamily(
        "tightwire_comm_exact_bytes", "Bytes rank 0 would have sent with nothing quantized", labels=labels
    )
    for count in stats.comm:
        values = [count.op, count.algorithm, count.phase]
        seconds.add_metric(values, count_value=count.calls, sum_value=count.seconds)
        sent.add_metric(values, count.bytes_sent)
        exact.add_metric(values, count.exact_bytes)
    yield seconds
    yield sent
    yield exact
