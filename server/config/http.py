"""Flags of the HTTP server."""

from dataclasses import dataclass

from tightwire.server.config.option import MAX_SECONDS, option, require, require_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """The outside door."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", metavar="N")
    api_key: str | None = option(None, "when set, every route but /health* and /metrics wants it as a Bearer token")
    max_queued_requests: int = option(256, "requests waiting or running before new ones get 429", metavar="N")
    max_body_bytes: int = option(4 << 20, "largest request body", metavar="BYTES")
    shutdown_grace_s: float = option(30.0, "after SIGTERM, how long running requests may take to finish", metavar="S")
    rank_timeout_s: float = option(10.0, "a rank silent for so long is taken for dead", metavar="S")
    step_timeout_s: float = option(
        120.0,
        "a step that begins no new collective, and gets nothing of a streamed layer, for so long is taken for hung",
        metavar="S",
    )

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, "port", self.port, "0 to 65535")
        # An unset variable in a script must not become a key that everybody can guess.
        require(self.api_key != "", "api_key", self.api_key, "left out, or not empty")
        for name in ("max_queued_requests", "max_body_bytes"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        grace_s = self.shutdown_grace_s
        require(0 <= grace_s <= MAX_SECONDS, "shutdown_grace_s", grace_s, f"0 to {MAX_SECONDS:g}")
        for name in ("rank_timeout_s", "step_timeout_s"):
            require_seconds(name, getattr(self, name))
