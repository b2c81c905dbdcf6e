"""The parts of the OpenAPI document that FastAPI cannot derive, because bodies and answers are bytes.

The schemas come from the types that parse the bodies and write the answers.
"""

from collections.abc import Sequence
from types import UnionType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{}"
_COMPONENTS = "x-components"
"""Key under which an operation carries schemas until `install` moves them to the document's components."""


class ErrorBody(msgspec.Struct):
    """What went wrong; `param` is the dotted path of the offending field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(msgspec.Struct):
    """Every answer that is not a success."""

    error: ErrorBody


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Declare a JSON request body of type `model`, which may be left out unless it is `required`."""
    schema = _open(model.model_json_schema(ref_template=_REF.format("{model}")))
    components = schema.pop("$defs", {})
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}, _COMPONENTS: components}


def _open(schema: Any) -> Any:
    """Return `schema` without the ban on unknown properties: they are accepted, and named in the answer."""
    if isinstance(schema, list):
        return [_open(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _open(value)
        for name, value in schema.items()
        if not (name == "additionalProperties" and value is False)
    }


def whole(answer: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """Declare a JSON answer, and errors."""
    return {
        200: _answer({"application/json": answer}),
        "default": _answer({"application/json": ErrorDocument}),
    }


def streamed_or_whole(
    answer: type[msgspec.Struct], chunk: type[msgspec.Struct] | UnionType, *, done: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Declare a JSON answer or a stream of events whose data are `chunk`s, and errors.

    Args:
        answer: what is sent whole.
        chunk: the data of an event.
        done: the last event's data is `[DONE]`, and an error within the stream is an `ErrorDocument`.
    """
    declared = whole(answer)
    ok = declared[200]
    schema = _schemas([chunk, ErrorDocument] if done else [chunk], ok[_COMPONENTS])
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": schema} if done else schema[0],
    }
    if done:
        data = {"anyOf": [data, {"type": "string", "const": "[DONE]"}]}
    # Of each event, not of the body: `itemSchema` is OpenAPI 3.2's, which FastAPI writes too.
    event = {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }
    ok["content"]["text/event-stream"] = {"itemSchema": event}
    return declared


def _answer(types: dict[str, type[msgspec.Struct]]) -> dict[str, Any]:
    components: dict[str, Any] = {}
    schemas = _schemas(list(types.values()), components)
    content = {name: {"schema": schema} for name, schema in zip(types, schemas, strict=True)}
    return {
        "description": "An error" if ErrorDocument in types.values() else "The answer",
        "content": content,
        _COMPONENTS: components,
    }


def _schemas(types: Sequence[type[msgspec.Struct] | UnionType], components: dict[str, Any]) -> list[Any]:
    """Return the schemas of `types`; schemas that they refer to are added to `components`."""
    schemas, referred = msgspec.json.schema_components(types, ref_template=_REF.format("{name}"))
    components |= referred
    return list(schemas)


def install(app: FastAPI) -> None:
    """Make `app` serve the whole document, built once when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = app.openapi_schema.setdefault("components", {}).setdefault("schemas", {})
            _collect(app.openapi_schema["paths"], schemas)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _collect(node: Any, schemas: dict[str, Any]) -> None:
    """Move what operations carry under `x-components` into `schemas`."""
    if isinstance(node, dict):
        for name, schema in node.pop(_COMPONENTS, {}).items():
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two types of the document are called {name}")
        for child in node.values():
            _collect(child, schemas)
    elif isinstance(node, list):
        for child in node:
            _collect(child, schemas)
