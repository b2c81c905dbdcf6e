import re

import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.errors import PermissionDeniedError
from gateway.http.sites import Sites, name_of
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.serving import CHAT, MESSAGES, in_process, settings

BODY = {"model": "glm", "messages": MESSAGES}
UNLOAD = "/v2/repository/models/glm/unload"
KEY = {"name": "k", "key": "secret"}
OUTSIDE = {"host": "0.0.0.0", "allow_anonymous": True}  # noqa: S104 - nothing is bound here


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Localhost:8080", "localhost"),
        ("[::1]:80", "::1"),
        ("example.org.", "example.org"),
        ("127.0.0.1", "127.0.0.1"),
        ("", ""),
        ("[::1", ""),
        ("[junk]", ""),
    ],
)
def test_the_name_in_a_host(host: str, name: str) -> None:
    assert name_of(host) == name


@pytest.mark.parametrize(
    ("given", "host", "allowed"),
    [
        ({}, "localhost:8080", True),
        ({}, "127.0.0.1", True),
        ({}, "10.0.0.7:8080", True),  # an address cannot be made to lead elsewhere
        ({}, "", True),  # HTTP/1.0
        ({}, "rebound.example:8080", False),
        ({}, "[junk", False),
        ({}, "localhost.example", False),
        ({"allowed_hosts": ["chat.example"]}, "CHAT.example:443", True),
        ({"allowed_hosts": ["chat.example"]}, "www.chat.example", False),
        ({"allowed_hosts": ["*.example"]}, "chat.example", True),
        ({"allowed_hosts": ["*.example"]}, "example", False),
        ({"allowed_hosts": ["*"]}, "rebound.example", True),
        ({"api_keys": [KEY]}, "chat.example", True),  # a page that was rebound has no key
        ({"api_keys": [KEY], "allowed_hosts": ["chat.example"]}, "other.example", False),
        (OUTSIDE, "chat.example", True),
        (OUTSIDE | {"allowed_hosts": ["chat.example"]}, "other.example", False),
    ],
)
def test_which_names_are_the_gateways(given: dict[str, object], host: str, allowed: bool) -> None:
    sites = Sites(settings(**given))
    if allowed:
        sites.check("POST", host, None)
    else:
        with pytest.raises(PermissionDeniedError, match="allowed_hosts"):
            sites.check("GET", host, None)


@pytest.mark.parametrize(
    ("method", "origin", "allowed"),
    [
        ("POST", "http://localhost:8080", True),
        ("POST", "http://LOCALHOST:8080", True),
        ("POST", "http://localhost:3000", False),
        ("POST", "http://evil.example", False),
        ("POST", "null", False),
        ("POST", "http://[junk", False),
        ("POST", "https://page.example", True),
        ("GET", "http://evil.example", True),  # the browser keeps the answer from the page
    ],
)
def test_pages_of_other_sites_only_read(method: str, origin: str, allowed: bool) -> None:
    sites = Sites(settings(cors_origins=["https://page.example"]))
    if allowed:
        sites.check(method, "localhost:8080", origin)
    else:
        with pytest.raises(PermissionDeniedError, match="cors_origins"):
            sites.check(method, "localhost:8080", origin)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://llm.example.org", True),
        ("http://LLM.example.org:8443", True),
        ("https://evil.example", False),
        ("https://evil.example#llm.example.org", False),
        ("https://llm.example.org@evil.example", False),
    ],
)
def test_behind_a_proxy_with_a_host_of_its_own_the_page_is_known_by_the_public_name(
    origin: str, allowed: bool
) -> None:
    sites = Sites(settings(allowed_hosts=["llm.example.org"]))
    if allowed:
        sites.check("POST", "127.0.0.1:8080", origin)
    else:
        with pytest.raises(PermissionDeniedError, match="allowed_hosts"):
            sites.check("POST", "127.0.0.1:8080", origin)


def test_any_host_is_no_name_of_a_page() -> None:
    with pytest.raises(PermissionDeniedError, match="allowed_hosts"):
        Sites(settings(allowed_hosts=["*"])).check("POST", "127.0.0.1:8080", "https://evil.example")


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", UNLOAD, "/v2/models/glm/infer", "/MutilBackendService/Predict"]
)
async def test_every_route_looks(path: str) -> None:
    async with in_process(FakeUpstream()) as served:
        for headers in ({"Origin": "http://evil.example"}, {"Host": "rebound.example"}):
            answer = await served.http.post(path, json=BODY, headers=headers)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        assert (await served.http.get("/v1/models", headers={"Host": "rebound.example"})).status_code == 403
        assert (await served.http.get("/health", headers={"Host": "10.1.2.3:8080"})).status_code == 200


async def test_no_route_is_left_out() -> None:
    """Each router has the check itself: the app takes routes as they are."""
    upstream = FakeUpstream()
    async with in_process(upstream) as served:
        routes = create_app(upstream.settings, upstream).routes
        asked = [
            (method, re.sub(r"{.*?}", "x", route.path))
            for route in routes
            if isinstance(route, Route)
            for method in route.methods or ()
        ]
        assert len(asked) > 30
        for method, path in asked:
            answer = await served.http.request(method, path, headers={"Host": "rebound.example"})
            assert answer.status_code == 403, (method, path)


async def test_without_keys_models_are_controlled_by_a_loopback_name_only() -> None:
    async with in_process(FakeUpstream(), allowed_hosts=["chat.example"]) as served:
        named = {"Host": "chat.example"}
        assert (await served.http.post(CHAT, json=BODY, headers=named)).status_code == 200
        for host in ("chat.example", "10.0.0.7", ""):
            assert (await served.http.post(UNLOAD, headers={"Host": host})).status_code == 403
        own = {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}
        assert (await served.http.post(UNLOAD, headers=own)).status_code == 200


async def test_a_page_that_may_use_the_gateway_is_told_so() -> None:
    async with in_process(FakeUpstream(), cors_origins=["https://page.example"]) as served:
        page = {"Origin": "https://page.example"}
        asked = page | {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        }
        answer = await served.http.options(CHAT, headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        inward = await served.http.options(
            CHAT, headers=asked | {"Access-Control-Request-Private-Network": "true"}
        )
        assert (inward.status_code, inward.headers.get("access-control-allow-private-network")) == (
            200,
            "true",
        )
        refused = await served.http.options(CHAT, headers=asked | {"Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in refused.headers
        for body, status in ((BODY, 200), (BODY | {"stream": True}, 200), ({}, 400)):
            answer = await served.http.post(CHAT, json=body, headers=page)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            assert answer.headers["access-control-expose-headers"] == "*"
        others = await served.http.post(CHAT, json=BODY, headers={"Origin": "http://evil.example"})
        assert others.status_code == 403
        served.gateway.drain.begin()
        late = await served.http.post(CHAT, json=BODY, headers=page)
        assert late.status_code == 503
        assert late.headers.get("access-control-allow-origin") == "https://page.example"
