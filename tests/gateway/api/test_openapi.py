from typing import Any

import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, in_process


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
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
