import pytest

from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, in_process

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("GET", "/nope", b"", {}, 404),
        ("GET", "/", b"", {}, 404),
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
            assert answer.headers["allow"]
