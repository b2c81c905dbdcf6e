"""A browser, and pages of gateways whose answers are scripted."""

import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Error, Page, Playwright, async_playwright

from gateway.core.events import Accepted, Delta, Event, Piece, Usage
from gateway.core.request import Conversation, Generation
from tests.gateway.fake_upstream import FakeUpstream, Script, say
from tests.gateway.serving import Served, on_socket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Of a browser that the system has; else the one that playwright brought, if it did."""

ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP rebound.example 127.0.0.1"]
"""The sandbox needs what containers do not allow; the pages are our own."""

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

Opened = Callable[..., AbstractAsyncContextManager[tuple[Page, Served]]]


async def launched(playwright: Playwright) -> Browser:
    system = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        return await playwright.chromium.launch(executable_path=system, args=ARGUMENTS)
    except Error as error:
        reason = f"no Chromium that starts (apt-get install chromium): {str(error).splitlines()[0]}"
        if os.environ.get("TEST_PAGE"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await launched(playwright)
        yield browser
        await browser.close()


@asynccontextmanager
async def opened_at(browser: Browser, url: str, **options: Any) -> AsyncIterator[Page]:
    """Open a page as a new visitor; its console must stay silent but for requests that failed."""
    context = await browser.new_context(**{"locale": "en-GB", "reduced_motion": "reduce"} | options)
    said: list[str] = []
    try:
        page = await context.new_page()
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        await page.goto(url)
        await page.locator("#model option").first.wait_for(state="attached")
        yield page
        assert [text for text in said if not text.startswith("Failed to load resource")] == []
    finally:
        await context.close()


@pytest.fixture
def opened(browser: Browser) -> Opened:
    @asynccontextmanager
    async def open_one(
        script: Script | None = None,
        path: str = "/",
        options: Any = None,
        models: tuple[str, ...] = ("glm", "org/glm-2"),
        **settings: Any,
    ) -> AsyncIterator[tuple[Page, Served]]:
        async with on_socket(FakeUpstream(script, models), **settings) as served:
            url = str(served.http.base_url).rstrip("/") + path
            async with opened_at(browser, url, **options or {}) as page:
                yield page, served

    return open_one


def echo(request: Generation) -> AsyncGenerator[Event, None]:
    """Answer with the last message."""
    assert isinstance(request.prompt, Conversation)
    return say("You said: ", request.prompt.messages[-1].content)


async def pieces(*given: Piece, finish: str = "stop") -> AsyncGenerator[Event, None]:
    """Answer with one delta of one token for each piece."""
    yield Accepted(prompt_tokens=1)
    for piece in given:
        yield Delta(pieces=(piece,), tokens=1)
    usage = Usage(prompt_tokens=1, completion_tokens=len(given))
    yield Delta(pieces=(), tokens=0, finish_reason=finish, usage=usage)


async def ask(page: Page, text: str = "hi") -> None:
    await page.fill("#question", text)
    await page.press("#question", "Enter")


async def answered(page: Page, count: int = 1) -> str:
    """Wait until so many answers have ended; return the text of the last."""
    await page.locator(".answer .stats").nth(count - 1).wait_for(state="attached")
    return await page.locator(".answer").last.inner_text()
