"""The OpenAPI document, and the page that shows it without loading anything from another host.

Bodies and answers are bytes to FastAPI, so their schemas come from the types that read and write them. Those
of bodies would be a seventh of what it takes to import the gateway, so they are made with the document.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from types import UnionType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, JSONResponse

from gateway.errors import ErrorDocument

_REF = "#/components/schemas/{}"
_COMPONENTS = "x-components"
"""Key under which an operation carries schemas until `install` moves them to the document's components."""
_bodies: dict[str, type[BaseModel]] = {}
"""Types of the bodies that operations refer to, by name."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
code { font-family: ui-monospace, monospace }
td { border-top: 1px solid #8884; padding: .2rem .8rem .2rem 0; vertical-align: top }
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Declare a JSON request body of type `model`, which may be left out unless it is `required`."""
    if _bodies.setdefault(model.__name__, model) is not model:
        raise ValueError(f"two types of bodies are called {model.__name__}")
    content = {"application/json": {"schema": {"$ref": _REF.format(model.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


def complete(
    answer: type[msgspec.Struct], error: type[msgspec.Struct] = ErrorDocument
) -> dict[int | str, dict[str, Any]]:
    """Declare a JSON answer, and errors."""
    return {200: _answer(answer, "The answer"), "default": _answer(error, "An error")}


def streamed_or_complete(
    answer: type[msgspec.Struct],
    chunk: type[msgspec.Struct] | UnionType,
    *,
    done: bool = False,
    error: type[msgspec.Struct] = ErrorDocument,
) -> dict[int | str, dict[str, Any]]:
    """Declare a JSON answer or a stream of events whose data are `chunk`s, and errors.

    With `done`, the last event's data is `[DONE]`, and an error within the stream is an `ErrorDocument`.
    """
    declared = complete(answer, error)
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


def _answer(answer: type[msgspec.Struct], description: str) -> dict[str, Any]:
    components: dict[str, Any] = {}
    (schema,) = _schemas([answer], components)
    content = {"application/json": {"schema": schema}}
    return {"description": description, "content": content, _COMPONENTS: components}


def _schemas(types: Sequence[type[msgspec.Struct] | UnionType], components: dict[str, Any]) -> list[Any]:
    """Return the schemas of `types`; schemas that they refer to are added to `components`."""
    schemas, referred = msgspec.json.schema_components(types, ref_template=_REF.format("{name}"))
    components |= referred
    return list(schemas)


def install(app: FastAPI) -> None:
    """Make `app` serve the document, and its page `/docs`.

    Each is built once, when first requested, on a thread: it takes longer than a stream should pause.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = built.setdefault("components", {}).setdefault("schemas", {})
            _collect(built["paths"], schemas)
            _, bodies = models_json_schema(
                [(model, "validation") for model in _bodies.values()], ref_template=_REF.format("{model}")
            )
            _collect({_COMPONENTS: bodies["$defs"]}, schemas)
            app.openapi_schema = built
        return app.openapi_schema

    @cache
    def page() -> str:
        return "".join(_page(document()))

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(document())

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> HTMLResponse:
        return HTMLResponse(page(), headers=_HEADERS)

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


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield f"<title>{title}</title><style>{_STYLE}</style>"
    yield f"<h1>{title}</h1><p>{escape(info['description'])}</p>"
    yield '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<details><summary><code>{escape(method.upper())} {escape(path)}</code> "
            yield f"{escape(operation.get('description', ''))}</summary>"
            fields = [
                (f"{each['name']} (in the {each['in']})", each.get("schema", {}), each.get("required", False))
                for each in operation.get("parameters", ())
            ]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = body.get("schema", {})
            schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
            fields += [
                (name, field, name in schema.get("required", ()))
                for name, field in schema.get("properties", {}).items()
            ]
            yield from _table(fields)
            yield "</details>"
    yield "</html>"


def _table(fields: list[tuple[str, dict[str, Any], bool]]) -> Iterator[str]:
    """Write fields: of each its name, its schema, and whether it has to be there."""
    if not fields:
        return
    yield "<table>"
    for name, schema, required in fields:
        needed = " (required)" if required else ""
        yield f"<tr><td><code>{escape(name)}</code>{needed}<td>{escape(_kind(schema))}"
        yield f"<td>{escape(schema.get('description', ''))}"
    yield "</table>"


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema's type in a few words; null is left out, as it means absent everywhere."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        kinds = dict.fromkeys(_kind(each) for each in choices if each.get("type") != "null")
        return " or ".join(kinds)
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return " | ".join(map(str, values))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]:{'.0f' if schema[key] == int(schema[key]) else 'g'}}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in schema
    ]
    return " ".join([kind, *bounds])
