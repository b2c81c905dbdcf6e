"""What a page of another site can do to a gateway of the same visitor: nothing, unless it is named."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from tests.gateway.fake_upstream import FakeUpstream, say_and_hang
from tests.gateway.serving import on_socket
from tests.page.conftest import opened_at

pytestmark = pytest.mark.asyncio(loop_scope="session")

SENDS = """async ([url, options]) => {
    try {
        const answer = await fetch(url, options);
        return [answer.status, await answer.text(), [...answer.headers.keys()]];
    }
    catch (error) { return [error.name, ''] }
}"""
CHAT = '{"model": "glm", "messages": [{"role": "user", "content": "hi"}]}'
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def another_site(browser: Browser) -> AsyncIterator[tuple[Page, str]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<p>mine</p>")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    page = await browser.new_page()
    try:
        await page.goto(origin)
        yield page, origin
    finally:
        await page.close()
        server.close()


async def send(page: Page, url: str, **options: Any) -> Any:
    return await page.evaluate(SENDS, [url, {"method": "POST"} | options])


async def test_it_cannot_write(browser: Browser) -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream) as served, another_site(browser) as (page, _):
        url = str(served.http.base_url).rstrip("/")
        # With a preflight; as a simple request, whose answer it would not see; as a form.
        assert (await send(page, url + "/v1/chat/completions", body=CHAT, headers=JSON))[0] == "TypeError"
        await send(page, url + "/v1/chat/completions", body=CHAT, mode="no-cors")
        await send(page, url + "/v1/models/glm/unload", mode="no-cors")
        await send(page, url + "/v2/repository/models/glm/unload", mode="no-cors", body="{}")
        async with page.expect_navigation():
            await page.evaluate(
                "url => { document.body.innerHTML = `<form method=post action=${url}>`;"
                "document.forms[0].submit() }",
                url + "/v1/models/glm/unload",
            )
        assert "cors_origins" in await page.inner_text("body")
        assert (upstream.requests, upstream.changes) == ([], [])


async def test_it_can_neither_read_nor_frame(browser: Browser) -> None:
    async with on_socket(FakeUpstream()) as served, another_site(browser) as (page, _):
        url = str(served.http.base_url).rstrip("/")
        assert (await send(page, url + "/v1/models", method="GET"))[0] == "TypeError"
        await page.evaluate(
            "url => document.body.append(Object.assign(document.createElement('iframe'), {src: url}))", url
        )
        await page.wait_for_timeout(500)
        assert await page.frames[-1].locator("#question").count() == 0


async def test_a_named_one_may(browser: Browser) -> None:
    upstream = FakeUpstream()
    async with another_site(browser) as (page, origin), on_socket(upstream, cors_origins=origin) as served:
        url = str(served.http.base_url).rstrip("/")
        status, text, _ = await send(page, url + "/v1/chat/completions", body=CHAT, headers=JSON)
        assert (status, "Hello world" in text) == (200, True)
        assert len(upstream.requests) == 1


async def test_a_named_one_reads_what_sdks_go_by(browser: Browser) -> None:
    upstream, keys = FakeUpstream(), [{"name": "page", "key": "sk", "requests_per_minute": 1}]
    asked = {"body": CHAT, "headers": JSON | {"Authorization": "Bearer sk"}}
    async with (
        another_site(browser) as (page, origin),
        on_socket(upstream, cors_origins=origin, api_keys=keys) as served,
    ):
        url = str(served.http.base_url).rstrip("/") + "/v1/chat/completions"
        answers = [await send(page, url, **asked) for _ in range(2)]
        assert [status for status, *_ in answers] == [200, 429]
        for _, _, headers in answers:
            assert {"x-request-id", "x-ratelimit-remaining-requests"} <= {*headers}
        assert "retry-after" in answers[1][2]
    async with (
        another_site(browser) as (page, origin),
        on_socket(
            FakeUpstream(lambda _: say_and_hang("late")), cors_origins=origin, request_timeout_s=0.2
        ) as served,
    ):
        url = str(served.http.base_url).rstrip("/") + "/v1/chat/completions"
        status, _, headers = await send(page, url, body=CHAT, headers=JSON)
        assert (status, "x-should-retry" in headers) == (504, True)


async def test_a_name_that_was_made_to_lead_here_is_refused(browser: Browser) -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream) as served:
        page = await browser.new_page()
        answer = await page.goto(f"http://rebound.example:{served.http.base_url.port}/")
        assert answer is not None
        assert answer.status == 403
        await page.close()
    async with on_socket(upstream, allowed_hosts="rebound.example") as served:
        url = f"http://rebound.example:{served.http.base_url.port}/"
        async with opened_at(browser, url) as page:
            assert await page.locator("#model option").first.inner_text() == "glm"
