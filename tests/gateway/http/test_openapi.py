import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, in_process

DOCS = Path(__file__).parents[3] / "docs"


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_the_document_is_whole(path: str) -> None:
    async with in_process(FakeUpstream()) as served:
        document = (await served.http.get("/openapi.json")).json()
    operation = document["paths"][path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "default" in operation["responses"]
    assert operation["requestBody"]["required"]
    schemas = document["components"]["schemas"]
    assert {reference.rpartition("/")[2] for reference in references(document)} <= set(schemas)
    assert "x-components" not in str(document)
    assert "HTTPValidationError" not in schemas


async def test_the_page_for_people_names_every_path_and_loads_nothing() -> None:
    async with in_process(FakeUpstream()) as served:
        answer = await served.http.get("/docs")
        document = (await served.http.get("/openapi.json")).json()
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    page = answer.text
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}</code>" in page
    assert "<code>messages</code> (required)" in page
    assert "<code>temperature</code>" in page
    assert "number ≥ 0 ≤ 2" in page
    assert not re.search(r"<(script|link|img|iframe)|src=|url\(|https?://", page)


async def test_a_body_that_may_be_left_out_is_declared_so() -> None:
    async with in_process(FakeUpstream()) as served:
        document = (await served.http.get("/openapi.json")).json()
    assert not document["paths"]["/v1/models/{model_id}/load"]["post"]["requestBody"]["required"]


@pytest.mark.parametrize("ending", [".md", ".zh.md"])
async def test_every_path_is_in_the_documents(ending: str) -> None:
    pages = [page for page in DOCS.glob("*.md") if page.name.endswith(".zh.md") is (ending == ".zh.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    async with in_process(FakeUpstream()) as served:
        paths = (await served.http.get("/openapi.json")).json()["paths"]
    shown = {path: re.sub(r"\{\w+\}", r"[^\\s/`]+", path) for path in paths}  # with any name in it
    assert {path for path, pattern in shown.items() if not re.search(rf"{pattern}(?![\w/])", text)} == set()
