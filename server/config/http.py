"""Options of the HTTP server: where it listens, who may use it, what it records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from tightwire.option import MAX_SECONDS, option, require, require_declared

_ORIGIN = re.compile(r"\*|[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#@]+")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The HTTP server: address, access, limits, log."""

    host: str = option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = option(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    uds: str | None = option(None, "Unix socket to listen on, in place of --host and --port", metavar="PATH")
    ssl_certfile: str | None = option(
        None, "certificate chain in PEM format; the server then speaks HTTPS. Needs --ssl-keyfile", metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "private key of --ssl-certfile in PEM format, not encrypted", metavar="FILE")
    api_key: str | None = option(
        None, "Bearer token that every route except /health*, /metrics and the pages then requires", metavar="KEY"
    )
    api_key_file: str | None = option(
        None,
        "YAML file of keys with names and limits, read again when it changes; see docs/deploy.md. Clients then need one of "
        "its keys, or --api-key",
        metavar="FILE",
    )
    chat_template: str | None = option(
        None, "file with a chat template (Jinja) to use in place of the model's own", metavar="FILE"
    )
    generation_config: str = option(
        "auto",
        "values of temperature, top_p, top_k, min_p and repetition_penalty, and a chat's most tokens (max_new_tokens), where a "
        "request has none. auto: those of the model's generation_config.json; none: OpenAI's, and what fits the context",
        ("auto", "none"),
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "origins whose pages may call this server from a browser, such as https://a.example, with commas between; * allows all",
        metavar="ORIGIN",
    )
    max_queued_requests: int = option(256, "most sequences that wait or run; more get status 429", least=1)
    strict_fields: bool = option(
        False,
        "refuse requests with unknown fields (status 400) instead of ignoring them. Ignored fields are named in the response "
        "header X-Tightwire-Ignored, and once in the log",
    )
    metrics_alias: str = option(
        "none",
        "second names on /metrics, with the same values. vllm: vllm:num_requests_running and others that vllm-router and "
        "production-stack read",
        ("none", "vllm"),
    )
    request_log: str | None = option(
        None,
        "append one line of JSON to this file for each request except /health*, /metrics and the pages: time, id, key name, route, "
        "model, status, tokens, time to the first token, total time",
        metavar="FILE",
    )
    request_log_prompts: bool = option(False, "also write prompts to --request-log")
    otlp_endpoint: str | None = option(
        None,
        "send a trace of each request to this OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318. Needs "
        "the extra `otel`. The OTEL_* variables apply; OTEL_EXPORTER_OTLP_ENDPOINT is the default",
        metavar="URL",
    )
    shutdown_grace_s: float = option(
        30.0, "time for running requests to finish after SIGTERM", metavar="S", least=0, most=MAX_SECONDS
    )
    log_level: str = option(
        "info", "info: a few lines at start, then warnings; debug: every decision, stage and rank", ("info", "debug")
    )

    def __post_init__(self) -> None:
        require_declared(self)
        try:
            self.host.encode("idna")  # as resolving it does
        except UnicodeError:
            require(False, "host", self.host, "an address or the name of a host")
        # An unset variable in a script must not become an empty key or path.
        require(self.api_key != "", "api_key", self.api_key, "left out, or not empty")
        for name in ("uds", "ssl_certfile", "ssl_keyfile", "api_key_file", "request_log", "chat_template"):
            path = getattr(self, name)
            require(path is None or "\0" not in (path or "\0"), name, path, "a path, or left out")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given, missing = ("certfile", "keyfile") if self.ssl_keyfile is None else ("keyfile", "certfile")
            raise ValueError(f"--ssl-{given} needs --ssl-{missing}; give both for HTTPS")
        for origin in self.cors_origin:
            want = "* or SCHEME://HOST[:PORT] without a path"
            require(_ORIGIN.fullmatch(origin) is not None, "cors_origin", origin, want)
        if self.request_log_prompts and self.request_log is None:
            raise ValueError("--request-log-prompts needs --request-log FILE")
        url = self.otlp_endpoint
        valid = url is None or re.match("https?://[^/]", url) is not None
        require(valid, "otlp_endpoint", url, "an http:// or https:// address")

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None


def wants_traces(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """True if the flag or a standard variable names a collector. ValueError: traces cannot be sent to it from here."""
    named = next((name for name in _ENDPOINTS if environment.get(name)), None)
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if endpoint is None and (named is None or exporter != "otlp"):
        return False
    source = "--otlp-endpoint" if endpoint is not None else named
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise ValueError(f"{source}: OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; this server sends http/protobuf only")
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http") and find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        installed = None
    if not installed:
        raise ValueError(f"{source} needs OpenTelemetry; pip install opentelemetry-exporter-otlp-proto-http")
    return True
