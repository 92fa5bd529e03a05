"""Reads and checks a request's JSON body; an invalid one becomes a 4xx that names the field."""

import logging
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tightwire.option import suggest
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.api.fields import MAX_NESTING, Fields, is_nested_deeply
from tightwire.server.api.prompts import run_off_loop
from tightwire.server.api.request_bodies import IGNORED_FIELDS, Body
from tightwire.server.api.serving import Serving
from tightwire.server.config.limits import MAX_BODY_BYTES

BodyT = TypeVar("BodyT", bound=Body)

_log = logging.getLogger(__name__)
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # after an even number of backslashes
_INDEX = re.compile(r"\[\d+\]")
_MAX_LOGGED_FIELDS = 1000  # clients choose the names
_MAX_PATH = 200


async def read_body(request: Request, kind: type[BodyT], serving: Serving) -> BodyT:
    """Read, parse and check the request's JSON. ApiError: 413 too large, 415 not JSON by its header, 400 otherwise."""
    _require_json(request)
    raw = await _read(request)
    request.state.num_bytes = len(raw)

    def check() -> BodyT:
        body = check_fields(_parse(raw), kind)
        ignored = {path: name for path, name, _ in _extra_fields(body) if name not in kind.unsupported}
        ignored |= dict(body.ignored_values())
        for path, name in ignored.items():
            _note_ignored(path, name, kind, serving)
        request.state.ignored_fields = list(ignored)
        return body

    return await run_off_loop(check, len(raw))


def _note_ignored(path: str, name: str, kind: type[Body], serving: Serving) -> None:
    """Log a field once. With --strict-fields: 400 unless it is in ``IGNORED_FIELDS``."""
    field, is_label, logged = _shown(_INDEX.sub("[]", path)), name in IGNORED_FIELDS, serving.logged_fields
    refused = serving.http.strict_fields and not is_label
    if not refused and (field in logged or len(logged) >= _MAX_LOGGED_FIELDS):
        return
    known = () if "." in path else kind.model_fields
    hint = "" if is_label else suggest(_shown(path), known, otherwise="; GET /openapi.json lists the fields")
    if refused:
        message = f"unknown field {_shown(path)!r}, which this server's --strict-fields refuses{hint}"
        raise invalid(message, _shown(path), "unknown_parameter")
    logged.add(field)
    # Many clients send labels; another name may be a typing error.
    level = logging.INFO if is_label else logging.WARNING
    _log.log(level, "ignored the field %r of a request (logged once per field)%s", field, hint)


def check_fields(fields: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Validate the fields; reject unsupported ones that would change the answer."""
    try:
        body = kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise _explain(error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    for path, name, value in _extra_fields(body):
        neutral, advice = kind.unsupported.get(name, ((value,), ""))
        if not any(value == allowed and isinstance(value, bool) is isinstance(allowed, bool) for allowed in neutral):
            raise invalid(f"{path}={_short(value)} is not supported: {advice}", path, code="unsupported_parameter")
    return body


def _extra_fields(fields: Fields, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of each unknown field, at any depth; ``null`` counts as not given."""
    for name, value in (fields.model_extra or {}).items():
        if value is not None:
            yield f"{path}{name}", name, value
    for name in sorted(fields.model_fields_set & type(fields).model_fields.keys()):
        value = getattr(fields, name)
        if isinstance(value, Fields):
            yield from _extra_fields(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Fields):
            for index, item in enumerate(value):
                yield from _extra_fields(item, f"{path}{name}[{index}].")


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.split(";")[0].strip().lower() != "application/json":
        message = f"the content type is {given[:100]!r}; send JSON with the header Content-Type: application/json"
        raise ApiError(415, message, code="unsupported_content_type")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the content encoding {encoding[:100]!r} is not supported; send the body uncompressed"
        raise ApiError(415, message, code="encoding")


async def _read(request: Request) -> bytes:
    """The body. Reading stops as soon as it is too large; Content-Length may be absent or wrong."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes; send less", code="body_too_large")
    return bytes(body)


def _parse(raw: bytes) -> dict[str, Any]:
    """Strict JSON: msgspec rejects NaN, Infinity, overflowing numbers, lone surrogates and invalid UTF-8."""
    if not raw:
        raise invalid("the body is empty; send a JSON object", code="invalid_json")
    try:
        fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))  # Windows writes a byte order mark
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(f"the body must be a JSON object, got {_short(fields)}", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_NESTING and is_nested_deeply(fields):
        raise invalid(f"the body is nested too deeply; at most {MAX_NESTING} levels are possible", code="invalid_json")
    if _NUL.search(raw):
        raise invalid("text may not contain the NUL character (\\u0000)", code="invalid_json")
    return fields


def _explain(error: ValidationError) -> ApiError:
    """One message for the first problem, with the value that was sent; further problems by field name."""
    first, *further = error.errors(include_url=False)
    param = _path(first["loc"])
    message = _describe(first, param)
    others = sorted({_path(problem["loc"]) for problem in further} - {param})
    if others:
        message += f" (and problems in {', '.join(others[:5])}{', ...' if len(others) > 5 else ''})"
    return invalid(message, param or None, "missing_parameter" if first["type"] == "missing" else "invalid_value")


def _describe(problem: ErrorDetails, param: str) -> str:
    if problem["type"] == "missing":
        return f"{param} is missing"
    if problem["type"] == "refused":
        return f"{param} {problem['msg']}"
    if problem["type"] == "kind" and isinstance(given := problem["input"], dict):
        return f"{param} is of the type {_short(given.get('type'))}; supported: {problem['msg']}"
    if problem["type"] == "kind":
        return f"{param} is {_short(problem['input'])}, not an object; supported: {problem['msg']}"
    said = problem["msg"][0].lower() + problem["msg"][1:].replace(" after validation", "")
    return f"{param}: {said}, got {_short(problem['input'])}"


def _path(parts: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as OpenAI writes it: ``messages[0].role``. A part after ~ names a kind (``told_apart``)."""
    named = [part for part in parts if isinstance(part, int) or not part.startswith("~")]
    return _shown("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named).removeprefix("."))


def _shown(path: str) -> str:
    return path[:_MAX_PATH].encode(errors="replace").decode()


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
