"""`GET /docs`: the OpenAPI document as a page for people, which loads nothing more."""

from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 }
code { font-family: ui-monospace, monospace }
td { border-top: 1px solid #8884; padding: .2rem .8rem .2rem 0; vertical-align: top }
"""
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def install(app: FastAPI) -> None:
    """Make `app` serve the page, built once when it is first asked for."""

    @cache
    def page() -> str:
        return "".join(_page(app.openapi()))

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(), headers=_HEADERS)


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
            fields = [_parameter(each) for each in operation.get("parameters", ())]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = _resolved(body.get("schema", {}), schemas)
            fields += [
                (name, field, name in schema.get("required", ()))
                for name, field in schema.get("properties", {}).items()
            ]
            yield from _table(fields)
            yield "</details>"
    yield "</html>"


def _parameter(parameter: dict[str, Any]) -> tuple[str, dict[str, Any], bool]:
    where = f"{parameter['name']} (in the {parameter['in']})"
    return where, parameter.get("schema", {}), parameter.get("required", False)


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


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    resolved = schemas.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return dict(resolved)
