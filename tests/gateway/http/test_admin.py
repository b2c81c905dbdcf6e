import asyncio
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import in_process, on_socket

KEYS = [
    {"name": "client", "key": "sk-1"},
    {"name": "operator", "key": "sk-2", "scopes": ["admin"]},
]


def error(answer: httpx.Response) -> tuple[int, Any, Any]:
    body = answer.json()["error"]
    return answer.status_code, body["param"], body["code"]


LOOPBACK = {"host": "127.0.0.1:8080"}


async def test_a_model_is_unloaded_and_loaded() -> None:
    upstream = FakeUpstream()
    async with in_process(upstream) as served:
        answer = (await served.http.post("/v1/models/glm/unload", headers=LOOPBACK)).json()
        assert (answer["model"]["id"], answer["model"]["ready"], answer["model"]["unloaded"]) == (
            "glm",
            False,
            True,
        )
        assert (await served.http.get("/v1/models/glm")).json()["unloaded"]
        answer = (await served.http.post("/v1/models/glm/load", headers=LOOPBACK)).json()
        assert answer["model"]["ready"]
        assert "unloaded" not in answer["model"]
        assert answer["changes"] == [{"upstream": "triton:8001", "entries": ["glm"]}]
        asked = {"reload": True, "upstream": "a:1"}
        await served.http.post("/v1/models/org/glm-2/load", json=asked, headers=LOOPBACK)
        assert served.metric(
            "requests_total", route="/v1/models/{model_id:path}/unload", model="glm", status="200"
        )
    assert upstream.changes == [
        ("unload", "glm", False, None),
        ("load", "glm", False, None),
        ("load", "org/glm-2", True, "a:1"),
    ]


@pytest.mark.parametrize("name", ["llama3:8b", "你好", "a b", "-a"])
async def test_a_model_may_have_any_name(name: str) -> None:
    upstream = FakeUpstream(models=(name,))
    async with in_process(upstream) as served:
        answer = await served.http.post(f"/v1/models/{quote(name)}/unload", headers=LOOPBACK)
        assert answer.status_code == 200
    assert upstream.changes == [("unload", name, False, None)]


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_bad_requests(action: str) -> None:
    async with in_process(FakeUpstream()) as served:
        post = partial(served.http.post, headers=LOOPBACK)
        assert error(await post(f"/v1/models/other/{action}", json={})) == (404, "model", "model_not_found")
        assert error(await post(f"/v1/models/{'a' * 257}/{action}", json={})) == (400, "model_id", None)
        for name in ("..%2fetc", "a%2f..%2fb", "-a", "a%00b", "%20", "a" * 256, "a b", "你好", ".a"):
            assert error(await post(f"/v1/models/{name}/{action}", json={}))[0] == 404, name
        assert error(await post(f"/v1/models/glm/{action}", json={"relod": True})) == (400, "relod", None)
        assert error(await post(f"/v1/models/glm/{action}", json={"upstream": 1})) == (400, "upstream", None)
        assert error(await post(f"/v1/models/glm/{action}", json=[]))[0] == 400
        assert error(await post(f"/v1/models/glm/{action}", data={"a": "b"}))[0] == 400
        assert error(await post(f"/v1/models/a//b/{action}")) == (404, "model", "model_not_found")
        assert (await served.http.put(f"/v1/models/glm/{action}")).status_code == 405
    assert not served.upstream.changes


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_only_admins_may(action: str) -> None:
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:

        async def with_key(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}  # whatever name it comes to
            return (await served.http.post(f"/v1/models/glm/{action}", json={}, headers=headers)).status_code

        assert [await with_key(key) for key in ("sk-1", "sk-2", "sk-3")] == [403, 200, 401]
        # Whoever may not, learns nothing of what there is.
        assert (await served.http.post(f"/v1/models/other/{action}", content=b"x")).status_code == 401
    assert len(served.upstream.changes) == 1


async def test_without_keys_only_this_machine_may() -> None:
    async with in_process(FakeUpstream(), host="192.0.2.1", allow_anonymous=True) as served:
        answer = await served.http.post("/v1/models/glm/unload", json={})
        assert error(answer) == (403, None, "model_control_disabled")
        assert (await served.chat()).status_code == 200
    assert not served.upstream.changes


PROXIED = [
    {"forwarded": "for=192.0.2.7"},
    {"x-forwarded-for": "192.0.2.7"},
    {"x-forwarded-host": "glm.example"},
    {"x-real-ip": "192.0.2.7"},
    {"via": "1.1 proxy"},
]
"""What proxies say of a request that they pass on, addressed to 127.0.0.1."""


@pytest.mark.parametrize("headers", PROXIED)
async def test_without_keys_nobody_controls_models_through_a_proxy(headers: dict[str, str]) -> None:
    async with in_process(FakeUpstream()) as served:
        for path in ("/v1/models/glm/unload", "/v2/repository/models/glm/unload"):
            answer = await served.http.post(path, headers=LOOPBACK | headers)
            assert answer.status_code == 403
            assert "proxy" in answer.text
        assert not served.upstream.changes
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        headers = headers | {"authorization": "Bearer sk-2"}
        assert (await served.http.post("/v1/models/glm/unload", headers=headers)).status_code == 200


async def test_without_keys_nobody_controls_models_by_http_1_0() -> None:
    """So nginx passes requests on by default: to 127.0.0.1, and without a word of where they are from."""
    head = b"POST /v1/models/glm/unload HTTP/1.0\r\nHost: 127.0.0.1:8080\r\nContent-Length: 0\r\n\r\n"
    async with on_socket(FakeUpstream()) as served:
        reader, writer = await asyncio.open_connection(served.http.base_url.host, served.http.base_url.port)
        writer.write(head)
        assert b" 403 " in await reader.readline()
        writer.close()
        assert not served.upstream.changes


@pytest.mark.parametrize(
    "headers",
    [
        LOOPBACK | {"origin": "http://evil.example"},
        LOOPBACK | {"origin": "null"},
        {"host": "rebound.example:8080", "origin": "http://rebound.example:8080"},
        {"host": "rebound.example"},
    ],
)
@pytest.mark.parametrize("action", ["load", "unload"])
async def test_web_pages_of_other_sites_control_no_models(headers: dict[str, str], action: str) -> None:
    """A form or a script of such a page can send this request: it needs no content type and no body."""
    async with in_process(FakeUpstream()) as served:
        for content in (b"", b"{}"):
            answer = await served.http.post(f"/v1/models/glm/{action}", content=content, headers=headers)
            assert error(answer)[0] == 403
        assert not served.upstream.changes
        own = {"host": "localhost:8080", "origin": "http://localhost:8080"}
        assert (await served.http.post(f"/v1/models/glm/{action}", headers=own)).status_code == 200
