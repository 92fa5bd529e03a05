"""Compares the objects inside the official clients' request types with those of the server's bodies, field by field.

``api_reference`` writes them to docs/api.md; ``tests/tools/test_api_reference`` sends every one of them.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

from tightwire.server.api.request_bodies import Body

IGNORED_TEXT = "Accepted and ignored"
_IGNORED_OBJECTS = ("Left out of the prompt", "A tool that", "A tool whose")  # how their docstrings begin
_WRAPPERS = (Required, NotRequired, Annotated)
_Schema = Mapping[str, Any]


class Step(NamedTuple):
    """A field of an object and the client's type of its value, or of each item of its value."""

    field: str
    kind: type
    is_list: bool


class Entry(NamedTuple):
    """A field of a nested object, or with ``kind`` a kind of object: its ``type``, or the ``role`` of a message."""

    path: str
    name: str
    status: str  # works, ignored or refused
    steps: tuple[Step, ...]  # from the body to the object
    kind: str = ""
    is_known: bool = True  # the body has the field; it is not named in X-Tightwire-Ignored


def members(annotation: Any, *, is_list: bool = False) -> Iterator[tuple[type, bool]]:
    """The TypedDicts of an annotation, and whether they are items of a list."""
    origin = get_origin(annotation)
    if is_typeddict(annotation):
        yield annotation, is_list
    elif origin in (Union, types.UnionType) or origin in _WRAPPERS:
        for each in get_args(annotation):
            yield from members(each, is_list=is_list)
    elif origin is not None and origin is not Literal and len(get_args(annotation)) == 1:
        yield from members(get_args(annotation)[0], is_list=True)


def fields_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    wrapped = get_origin(annotation) in (Union, types.UnionType, *_WRAPPERS)
    return tuple(value for each in get_args(annotation) for value in literals(each)) if wrapped else ()


class Comparison:
    """The comparison of one route. ``official``: the client's type of the body."""

    def __init__(self, official: type, body: type[Body]) -> None:
        self._official, self._body = official, body
        self._schema = body.model_json_schema()

    def entries(self) -> Iterator[Entry]:
        for field, annotation in sorted(fields_of(self._official).items()):
            own = self._schema["properties"].get(field)
            if own is not None and _status(own) == "works":
                yield from self._compare(field, [((), field, annotation)], own)

    def _compare(
        self, path: str, given: Sequence[tuple[tuple[Step, ...], str, Any]], schema: _Schema
    ) -> Iterator[Entry]:
        """``given``: the field's annotation in each of the client's types that have it, with the way to it."""
        objects = list(self._objects(schema))
        groups: dict[str, list[tuple[Step, ...]]] = {}
        kinds: dict[Any, Entry] = {}
        steps = [(*way, Step(field, *each)) for way, field, annotation in given for each in members(annotation)]
        if not objects or not steps:
            return
        path += "[]" if any(way[-1].is_list for way in steps) else ""
        for way in steps:
            name = self._match(way[-1].kind, objects)
            if name is not None and not self._definition(name).get("description", "").startswith(_IGNORED_OBJECTS):
                groups.setdefault(name, []).append(way)
                continue
            key, values = _tag(way[-1].kind)
            for value in values:
                kinds.setdefault(value, Entry(path, value, "ignored" if name else "refused", way, kind=key))
        yield from kinds.values()
        for name, ways in groups.items():
            label = f"{path} {self._label(name)}" if len(groups) > 1 else path
            yield from self._compare_objects(label, ways, self._definition(name)["properties"])

    def _compare_objects(self, path: str, ways: Sequence[tuple[Step, ...]], own: _Schema) -> Iterator[Entry]:
        names = dict.fromkeys(name for way in ways for name in fields_of(way[-1].kind))
        annotations = {
            name: [(way, name, hints[name]) for way in ways if name in (hints := fields_of(way[-1].kind))]
            for name in names
        }
        for name in names:
            unknown = "refused" if name in self._body.unsupported else "ignored"
            status = _status(own[name]) if name in own else unknown
            yield Entry(path, name, status, annotations[name][0][0], is_known=name in own)
        for name in names:
            if name in own and _status(own[name]) == "works":
                yield from self._compare(f"{path}.{name}", annotations[name], own[name])

    def _definition(self, name: str) -> _Schema:
        return self._schema["$defs"][name]

    def _objects(self, schema: _Schema) -> Iterator[str]:
        """The names of the objects that the value, or an item of it, may be."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if "properties" in self._definition(name):
                yield name
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *filter(None, [schema.get("items")])):
            yield from self._objects(part)

    def _match(self, kind: type, objects: Sequence[str]) -> str | None:
        """The object that takes the client's type: by the values of ``type`` and ``role``."""
        hints, free = fields_of(kind), None
        for name in objects:
            own = self._definition(name)["properties"]
            fits = True
            for key in ("type", "role"):
                values, allowed = literals(hints.get(key)), _constants(own.get(key, {}))
                fits = fits and (not values or not allowed or bool(set(values) & allowed))
            if fits and "type" in own and not _constants(own["type"]):
                free = name  # any type
            elif fits:
                return name
        return free

    def _label(self, name: str) -> str:
        kinds = _constants(self._definition(name)["properties"].get("type", {}))
        return f"({', '.join(sorted(kinds))})"


def _tag(kind: type) -> tuple[str, tuple[Any, ...]]:
    hints = fields_of(kind)
    key = "type" if literals(hints.get("type")) else "role"
    return key, literals(hints.get(key)) or (kind.__name__,)


def _constants(schema: _Schema) -> set[Any]:
    parts = [schema, *schema.get("anyOf", ())]
    return {value for part in parts for value in (*part.get("enum", ()), *filter(None, (part.get("const"),)))}


def _status(schema: _Schema) -> str:
    is_any = not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "const", "enum"}
    return "ignored" if is_any or schema.get("description", "").startswith(IGNORED_TEXT) else "works"
