"""Reads and checks a request's JSON body; an invalid one becomes a 4xx that names the field."""

from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tightwire.comm.errors import suggest
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.api.schemas import IGNORED_FIELDS, UNSUPPORTED_FIELDS, Body
from tightwire.server.config.limits import MAX_BODY_BYTES

BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, kind: type[BodyT], *, max_bytes: int = MAX_BODY_BYTES) -> BodyT:
    """Read, parse and check the request's JSON.

    Raises:
        ApiError: 413 too large (detected while it arrives), 415 not JSON by its header, 400 otherwise.
    """
    _require_json(request)
    fields = _parse(await _read(request, max_bytes))
    return check_fields(fields, kind)


def check_fields(fields: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """Drop ignored fields, reject unsupported ones, and validate the rest."""
    known = {}
    for name, value in fields.items():
        if value is None or name in IGNORED_FIELDS:
            continue
        if name in UNSUPPORTED_FIELDS and name not in kind.model_fields:
            _require_neutral(name, value)
            continue
        known[name] = value
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _explain(error, kind) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def _require_json(request: Request) -> None:
    given = request.headers.get("content-type", "")
    if given.split(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the content type is {given[:100]!r}; send JSON with the header Content-Type: application/json",
            code="unsupported_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            415,
            f"the content encoding {encoding[:100]!r} is not supported; send the body uncompressed",
            code="encoding",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body. Reading stops as soon as it is too large, because Content-Length may be absent or wrong."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes; send less"
    return ApiError(413, message, code="body_too_large")


def _parse(raw: bytes) -> dict[str, Any]:
    """Strict JSON: msgspec rejects NaN, Infinity, overflowing numbers, lone surrogates and invalid UTF-8."""
    if not raw:
        raise invalid("the body is empty; send a JSON object", code="invalid_json")
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(f"the body must be a JSON object, not {_kind(fields)}", code="invalid_json")
    if rb"\u0000" in raw and (path := _find_nul(fields)) is not None:
        raise invalid("text may not contain the NUL character (\\u0000)", param=path)
    return fields


def _find_nul(fields: dict[str, Any]) -> str | None:
    """The top-level field whose keys or strings contain a NUL."""
    for name, field in fields.items():
        pending = [name, field]
        while pending:
            value = pending.pop()
            if isinstance(value, str) and "\0" in value:
                return name.replace("\0", "\\u0000")
            pending += (
                [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
            )
    return None


def _require_neutral(name: str, value: Any) -> None:
    neutral, advice = UNSUPPORTED_FIELDS[name]
    if not any(value == allowed and type(value) is type(allowed) for allowed in neutral):
        raise invalid(f"{name}={_short(value)} is not supported: {advice}", param=name, code="unsupported_parameter")


def _explain(error: ValidationError, kind: type[Body]) -> ApiError:
    """One message for the first problem, with the value that was sent; further problems by field name."""
    problems = error.errors(include_url=False)
    first = problems[0]
    param = _path(first["loc"])
    message = _describe(first, param, kind)
    others = sorted({_path(problem["loc"]) for problem in problems[1:]} - {param})
    if others:
        message += f" (and problems in {', '.join(others[:5])}{', ...' if len(others) > 5 else ''})"
    code = {"missing": "missing_parameter", "extra_forbidden": "unknown_parameter"}.get(first["type"], "invalid_value")
    return invalid(message, param=param or None, code=code)


def _describe(problem: ErrorDetails, param: str, kind: type[Body]) -> str:
    if problem["type"] == "missing":
        return f"{param} is missing"
    if problem["type"] == "extra_forbidden":
        return f"unknown field {param!r}" + suggest(param, kind.model_fields, otherwise="; see GET /openapi.json")
    if problem["type"] == "refused":
        return f"{param} {problem['msg']}"
    said = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{param}: {said}, got {_short(problem['input'])}"


def _path(parts: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as OpenAI writes it: ``messages[0].role``."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    return path[:200].encode(errors="replace").decode()


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), "a number or null")
