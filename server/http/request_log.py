"""Writes the request log: one line of JSON for each request."""

import logging
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

import msgspec
from pydantic_core import to_jsonable_python

from tightwire.server.api.trace import RequestRecord


class RequestLog:
    """Appends to a file, which may be renamed meanwhile (log rotation)."""

    def __init__(self, path: str, *, prompts: bool) -> None:
        """``prompts``: write prompts too. OSError: the file cannot be written."""
        self._prompts, self._handler = prompts, WatchedFileHandler(path, encoding="utf-8")
        weakref.finalize(self, self._handler.close)

    def __call__(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        tokens = record.count_tokens()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.arrived_unix_s, UTC).isoformat(timespec="milliseconds"),
            "id": record.id,
            "key": record.key,
            "method": record.method,
            "route": record.path,
            "model": record.model,
            "status": record.status,
            "finish_reasons": record.finish_reasons,
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.answer,
            "ttft_s": _since(record, record.first_token_s),
            "total_s": _since(record, record.ended_s),
        }
        if self._prompts and record.asked is not None:
            field = record.asked.text_param
            line[field] = to_jsonable_python(getattr(record.asked, field), exclude_none=True)
        text = msgspec.json.encode(line).decode()
        self._handler.handle(logging.LogRecord("requests", logging.INFO, "", 0, text, None, None))


def _since(record: RequestRecord, moment_s: float | None) -> float | None:
    return None if moment_s is None else round(moment_s - record.arrived_s, 6)
