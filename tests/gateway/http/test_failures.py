from collections.abc import Iterator

import pytest

from gateway.errors import GatewayError, RateLimitError
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, MESSAGES, in_process, on_socket

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/nope", b"", {}, 404),
        ("GET", "/nothing", b"", {}, 404),
        ("GET", CHAT, b"", {}, 405),
        ("DELETE", "/v1/models", b"", {}, 405),
        ("OPTIONS", CHAT, b"", {}, 405),
        ("POST", CHAT, b"{}", {}, 415),
        ("POST", CHAT, b"{}", {"content-type": "text/plain"}, 415),
        ("POST", CHAT, b"", JSON, 400),
        ("POST", CHAT, b"{", JSON, 400),
        ("POST", CHAT, b"[]", JSON, 400),
        ("POST", CHAT, b'"x"', JSON, 400),
        ("POST", CHAT, b"null", JSON, 400),
        ("POST", CHAT, b'{"model": NaN}', JSON, 400),
        ("POST", CHAT, b'{"model": "\xff"}', JSON, 400),
        ("POST", CHAT, b'{"model": "\\ud800"}', JSON, 400),
        ("POST", CHAT, b'{"a":' * 100_000, JSON, 400),
        ("POST", CHAT, b"{}", {"content-type": "application/json; charset=utf-8"}, 400),
    ],
)
async def test_one_shape_for_every_error(
    method: str, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    async with in_process(FakeUpstream()) as served:
        answer = await served.http.request(method, path, content=content, headers=headers)
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["content-type"] == "application/json"
        if status == 405:
            assert f"it takes {answer.headers['allow']}." in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/responses/input_tokens", "/v1/responses/input_tokens"),
        ("/v1/batch", None),
        ("/models", "/v1/models"),
        ("/models/glm", "/v1/models/glm"),
        ("/v1/v1/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/v1/Chat/Completions", CHAT),
        ("/chat/completion", CHAT),
        ("/v1/tokenize", "/tokenize"),
        ("/helth", "/health"),
        ("/nothing/like/it", None),
        ("/" + "a" * 5000, None),
        ("/", None),
    ],
)
async def test_a_near_miss_is_answered_with_what_was_meant(path: str, meant: str | None) -> None:
    async with in_process(FakeUpstream(), chat_page=False) as served:
        for answer in (await served.http.post(path, json={}), await served.http.get(path)):
            assert answer.status_code == 404
            said = f": did you mean {meant}?" if meant else "."
            assert answer.json()["error"]["message"] == f"There is nothing at this path{said}"


@pytest.mark.parametrize(
    ("method", "path", "instead"),
    [
        ("GET", "/v1/responses/resp_1", "store=False"),
        ("DELETE", "/v1/responses/r1", "store=False"),
        ("POST", "/responses/resp_1/cancel", "store=False"),
        ("POST", "/v1/conversations", "store=False"),
        ("GET", "/v1/batches", "`tritongate batch`"),
        ("GET", "/v1/batches/batch_1", "`tritongate batch`"),
        ("POST", "/v1/files", "`tritongate batch`"),
        ("GET", "/v1/messages/batches", "`tritongate batch`"),
        ("POST", "/v1/audio/speech", "/docs"),
        ("GET", "/v1/realtime", "/docs"),
        ("POST", "/rerank", "/docs"),
        ("POST", "/openai/deployments/glm/chat/completions", "base URL"),
        ("POST", "/v1/engines/glm/completions", "name the model in the body"),
    ],
)
async def test_a_path_of_what_others_have_says_what_to_do_instead(
    method: str, path: str, instead: str
) -> None:
    async with in_process(FakeUpstream()) as served:
        answer = await served.http.request(method, path)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, "which this one does not" in message, instead in message) == (404, True, True)


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/models//"])
async def test_needless_slashes_do_not_count(path: str) -> None:
    async with on_socket(FakeUpstream()) as served:
        answer = await served.http.get(str(served.http.base_url).rstrip("/") + path)
        assert [model["id"] for model in answer.json()["data"]] == ["glm", "org/glm-2"]
        assert served.metric("requests_total", route="/v1/models", model="unknown", status="200") == 1
        post = await served.http.post(CHAT + "/", json={"model": "glm", "messages": MESSAGES})
        assert post.status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/glm", "/version", "/metrics", "/v2", "/openapi.json", "/docs"]
)
async def test_head_is_answered_as_get_without_a_body(path: str) -> None:
    async with on_socket(FakeUpstream()) as served:
        answer, whole = await served.http.head(path), await served.http.get(path)
        assert answer.status_code == whole.status_code == 200
        assert answer.content == b""
        assert answer.headers["content-type"] == whole.headers["content-type"]
        assert "transfer-encoding" not in answer.headers
        # The connection goes on.
        assert (await served.http.get("/version")).status_code == 200
        assert (await served.http.head(CHAT)).status_code == 405
        assert (await served.http.head("/nope")).status_code == 404


def kinds(of: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield of
    for each in of.__subclasses__():
        yield from kinds(each)


def test_whoever_may_come_again_is_told_when() -> None:
    told = {kind.status: kind("why").retry_after_s is not None for kind in kinds(GatewayError)}
    assert {status for status, is_told in told.items() if is_told} == {429, 503}
    assert RateLimitError("why", retry_after_s=7).retry_after_s == 7
