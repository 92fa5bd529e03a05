"""Finds the key of a request, and keeps each key within its limits."""

import contextlib
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tightwire.server.api.errors import ApiError
from tightwire.server.config.http import HttpOptions
from tightwire.server.config.keys import ApiKey, digest_of, read_keys

_log = logging.getLogger(__name__)

API_KEY_NAME = "api-key"  # of the key that --api-key gives
_LOOK_EVERY_S = 1.0
_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """An allowance of ``limit`` a minute. It is full at the start, fills up evenly, and may be overdrawn."""

    level: float = math.inf
    at_s: float = 0.0

    def wait_s(self, limit: int, now_s: float) -> float:
        """Fill up; returns the seconds until one more request may start."""
        rate = limit / _MINUTE_S
        self.level = min(float(limit), self.level + rate * (now_s - self.at_s))
        self.at_s = now_s
        return max(0.0, (1.0 - self.level) / rate)


@dataclass(slots=True)
class _Use:
    num_running: int = 0
    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)


class KeyRing:
    """The keys of --api-key and --api-key-file. The file is read again when it has changed; a wrong one changes nothing."""

    def __init__(self, http: HttpOptions, clock: Callable[[], float] = time.monotonic) -> None:
        """ValueError: the file is wrong."""
        self._http, self._clock = http, clock
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._version, self._keys = self._file_version(), self._read()
        self._looked_s = clock()

    def find(self, given: bytes) -> ApiKey | None:
        self._read_if_changed()
        # The place of a digest says nothing about the key, so the lookup needs no constant time.
        return self._keys.get(digest_of(given))

    def begin(self, key: ApiKey) -> None:
        """Count the start of a request. ApiError 429: the key is at one of its limits."""
        use, now_s = self._uses[key.name], self._clock()
        if key.requests_at_once is not None and use.num_running >= key.requests_at_once:
            raise _too_many(f"{key.requests_at_once} requests at once", 1.0)
        limits = (use.tokens, key.tokens_per_minute, "tokens"), (use.requests, key.requests_per_minute, "requests")
        for bucket, limit, unit in limits:
            if limit is not None and (wait_s := bucket.wait_s(limit, now_s)) > 0:
                raise _too_many(f"{limit} {unit} a minute", wait_s)
        use.num_running += 1
        use.requests.level -= 1

    def end(self, key: ApiKey, num_tokens: int) -> None:
        """Count the end of a request with this many tokens of prompt and answer."""
        use = self._uses[key.name]
        use.num_running -= 1
        use.tokens.level -= num_tokens

    def _read_if_changed(self) -> None:
        now_s = self._clock()
        if self._http.api_key_file is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        if (version := self._file_version()) == self._version:
            return
        self._version = version
        try:
            self._keys = self._read()
        except ValueError as error:
            _log.error("%s; the keys read before stay valid", error)
            return
        _log.warning("--api-key-file %s has changed: %d keys", self._http.api_key_file, len(self._keys))

    def _read(self) -> dict[bytes, ApiKey]:
        keys = {} if self._http.api_key_file is None else read_keys(self._http.api_key_file)
        if self._http.api_key is not None:
            if any(key.name == API_KEY_NAME for key in keys.values()):
                raise ValueError(f"--api-key-file: the name {API_KEY_NAME!r} belongs to the key of --api-key")
            keys[digest_of(self._http.api_key.encode())] = ApiKey(name=API_KEY_NAME)
        return keys

    def _file_version(self) -> tuple[int, ...] | None:
        """Numbers that differ after a change of the file, or None if it cannot be found."""
        with contextlib.suppress(OSError):
            found = os.stat(self._http.api_key_file or "")
            return found.st_mtime_ns, found.st_size, found.st_ino
        return None


def _too_many(limit: str, wait_s: float) -> ApiError:
    seconds = max(1, math.ceil(wait_s))
    message = f"this API key allows {limit}; try again in {seconds} s"
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})
