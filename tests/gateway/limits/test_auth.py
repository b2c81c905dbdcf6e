import contextlib
import hashlib
import secrets
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from gateway.errors import AuthenticationError, PermissionDeniedError
from gateway.limits import keys as auth
from gateway.limits.keys import Keyring
from gateway.settings.values import ApiKey, Scope
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import MESSAGES, in_process, on_socket
from tests.ports import free_ports

KEYS = [
    {"name": "plain", "key": "sk-1"},
    {
        "name": "hashed",
        "sha256": hashlib.sha256(b"sk-2").hexdigest().upper(),
        "scopes": ["inference", "admin"],
    },
    {"name": "operator", "key": "sk-3", "scopes": ["admin"]},
    {"name": "voilà", "key": "clé à"},
]


@pytest.fixture
def keyring() -> Keyring:
    return Keyring([ApiKey.model_validate(key) for key in KEYS])


@pytest.mark.parametrize(
    ("header", "name"), [("Bearer sk-1", "plain"), ("bearer  sk-2 ", "hashed"), ("BEARER sk-2", "hashed")]
)
def test_known_keys(keyring: Keyring, header: str, name: str) -> None:
    assert keyring.authorize({"authorization": header}, Scope.INFERENCE) == name


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "sk-1"},
        {"x-api-key": "sk-1", "authorization": "Basic cHJveHk6"},
        {"x-api-key": "for a proxy", "authorization": "Bearer sk-1"},
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(keyring: Keyring, headers: dict[str, str]) -> None:
    assert keyring.authorize(headers, Scope.INFERENCE) == "plain"


@pytest.mark.parametrize(
    "header", [None, "", "sk-1", "Bearer", "Bearer ", "Basic sk-1", "Bearer sk-", "Bearer sk-11", "Bearer é"]
)
def test_unknown_keys(keyring: Keyring, header: str | None) -> None:
    with pytest.raises(AuthenticationError) as refusal:
        keyring.authorize({} if header is None else {"authorization": header}, Scope.INFERENCE)
    assert "sk-" not in refusal.value.message


def test_a_client_without_a_key_is_told_both_headers(keyring: Keyring) -> None:
    with pytest.raises(AuthenticationError, match="Authorization: Bearer KEY, or x-api-key: KEY"):
        keyring.authorize({}, Scope.INFERENCE)


@pytest.mark.parametrize(
    "presented", ["sk-1", "sk-2", "sk-3", "clé à".encode().decode("latin-1"), "sk-9", "s", "sk-1" * 50]
)
def test_each_key_is_compared_in_constant_time(presented: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every known key, whichever it is, and as digests, so that all are equally long."""
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return secrets.compare_digest(one, other)

    keyring = Keyring([ApiKey.model_validate(key) for key in KEYS])
    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare_digest))
    with contextlib.suppress(AuthenticationError, PermissionDeniedError):
        keyring.authorize({"authorization": f"Bearer {presented}"}, Scope.INFERENCE)
    digest = hashlib.sha256(presented.encode("latin-1")).digest()
    assert [other for _, other in compared] == [digest] * len(KEYS)
    assert {len(each) for each, _ in compared} == {len(digest)}
    assert len({each for each, _ in compared}) == len(KEYS)


async def test_a_key_beyond_ascii_is_sent_as_its_utf8() -> None:
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        bearer = {"authorization": "Bearer clé à".encode()}
        assert (await served.http.get("/v1/models", headers=bearer)).status_code == 200


def test_scopes(keyring: Keyring) -> None:
    assert keyring.authorize({"authorization": "Bearer sk-3"}, Scope.ADMIN) == "operator"
    with pytest.raises(PermissionDeniedError):
        keyring.authorize({"authorization": "Bearer sk-3"}, Scope.INFERENCE)
    with pytest.raises(PermissionDeniedError):
        keyring.authorize({"authorization": "Bearer sk-1"}, Scope.ADMIN)


def test_without_keys_everybody_may() -> None:
    assert Keyring([]).authorize({}, Scope.ADMIN) is None


@pytest.mark.parametrize(
    ("key", "kind"), [("sk-9", openai.AuthenticationError), ("sk-3", openai.PermissionDeniedError)]
)
async def test_the_sdk_sees_its_exceptions(key: str, kind: type[openai.APIStatusError]) -> None:
    async with on_socket(FakeUpstream(), key=key, api_keys=KEYS) as served:
        with pytest.raises(kind):
            await served.sdk.chat.completions.create(model="glm", messages=MESSAGES)
        with pytest.raises(kind):
            await served.sdk.models.list()


async def test_what_needs_no_key() -> None:
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        for path in ("/health", "/health/ready", "/metrics", "/version"):
            assert (await served.http.get(path)).status_code == 200
        assert (await served.http.options("/v1/chat/completions")).headers["allow"] == "POST"
        assert (await served.http.get("/v1/models")).headers["www-authenticate"] == "Bearer"


SCRAPER = {"name": "prometheus", "key": "sk-4", "scopes": ["metrics"]}


@pytest.mark.parametrize("values", [{"metrics_need_key": True}, {"host": "0.0.0.0"}])  # noqa: S104
async def test_metrics_need_a_key_of_their_scope_beyond_loopback(values: Any) -> None:
    async with in_process(FakeUpstream(), api_keys=[*KEYS, SCRAPER], **values) as served:

        async def status(bearer: str) -> int:
            headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
            return (await served.http.get("/metrics", headers=headers)).status_code

        assert [await status(bearer) for bearer in ("", "sk-1", "sk-3", "sk-4")] == [401, 403, 403, 200]


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Host"])
async def test_metrics_need_a_key_through_a_proxy_on_this_machine(name: str) -> None:
    async with in_process(FakeUpstream(), api_keys=KEYS, allowed_hosts=["*"]) as served:
        assert (await served.http.get("/metrics")).status_code == 200
        assert (await served.http.get("/metrics", headers={name: "gateway.example"})).status_code == 401


async def test_metrics_on_loopback_and_where_there_are_no_keys_need_none() -> None:
    for values in ({"api_keys": KEYS}, {"host": "0.0.0.0", "allow_anonymous": True}):  # noqa: S104
        async with in_process(FakeUpstream(), **values) as served:
            assert (await served.http.get("/metrics")).status_code == 200


async def test_an_address_for_metrics_has_nothing_else() -> None:
    (port,) = free_ports(1)
    values = {"host": "0.0.0.0", "metrics_address": f"127.0.0.1:{port}"}  # noqa: S104
    async with in_process(FakeUpstream(), api_keys=KEYS, **values) as served:
        assert (await served.http.get("/metrics")).status_code == 401
        served.http.base_url = httpx.URL(f"http://127.0.0.1:{port}")  # the port that the server says it is
        assert (await served.http.get("/metrics")).status_code == 200
        assert (await served.http.get("/health")).status_code == 404
        bearer = {"authorization": "Bearer sk-1"}
        assert (await served.http.get("/v1/models", headers=bearer)).status_code == 404


@pytest.mark.parametrize(
    ("host", "values", "status"),
    [
        ("0.0.0.0", {}, 200),  # noqa: S104 - as in containers, whose Prometheus knows the host by some name
        ("0.0.0.0", {"api_keys": KEYS, "allowed_hosts": ["chat.example"]}, 200),  # noqa: S104
        ("127.0.0.1", {}, 403),  # a page that was made to lead here
    ],
)
async def test_an_address_for_metrics_has_the_names_of_its_network(
    host: str, values: Any, status: int
) -> None:
    (port,) = free_ports(1)
    async with in_process(FakeUpstream(), metrics_address=f"{host}:{port}", **values) as served:
        served.http.base_url = httpx.URL(f"http://host.docker.internal:{port}")
        assert (await served.http.get("/metrics")).status_code == status
        assert (await served.http.get("/v1/models")).status_code == 404
