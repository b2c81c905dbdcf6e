"""What went wrong is said in words, and what had arrived stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Route, expect

from gateway.errors import ContextLengthError, GatewayError, QuotaError, RateLimitError, UnavailableError
from tests.gateway.fake_upstream import FakeUpstream, say, say_and_hang
from tests.gateway.serving import on_socket
from tests.page.conftest import Opened, answered, ask, opened_at

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Wire:
    """A connection between browser and gateway that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_gateway, to_gateway = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, to_gateway]
        await asyncio.gather(_copy(reader, to_gateway), _copy(from_gateway, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def wired(port: int) -> AsyncIterator[tuple[str, Wire, asyncio.Server]]:
    wire = Wire(port)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", wire, server
    finally:
        server.close()
        wire.cut()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RateLimitError("The queue is full.", retry_after_s=7),
            "Too many requests right now. Try again in 7 seconds.",
        ),
        (
            RateLimitError("The queue is full.", retry_after_s=0),
            "Too many requests right now. Try again in a moment.",
        ),
        (
            RateLimitError("The queue is full.", retry_after_s=150),
            "Too many requests right now. Try again in 3 minutes.",
        ),
        (
            QuotaError("This API key has used its 100 tokens of this day.", retry_after_s=55174),
            "Your key has used what it may use in a day. Try again in 16 hours.",
        ),
        (ContextLengthError("65 tokens are too many."), "longer than the model can read"),
        (UnavailableError("Not ready: glm."), "No model can answer right now"),
    ],
)
async def test_a_refusal_in_words(opened: Opened, error: GatewayError, words: str) -> None:
    attempts: list[int] = []

    async def script(_: object) -> AsyncIterator[object]:
        attempts.append(1)
        if len(attempts) == 1:
            raise error
        async for event in say("Now it works."):
            yield event

    async with opened(script) as (page, _):
        await ask(page)
        shown = await answered(page)
        assert words in shown
        assert error.message in shown
        await page.get_by_role("button", name="Retry").click()
        await expect(page.locator(".answer .prose")).to_have_text("Now it works.")
        await expect(page.locator("#log .error")).to_have_count(0)


async def test_a_key_is_asked_for_and_stays_in_the_browser(opened: Opened) -> None:
    keys = [{"name": "a", "key": "secret"}]
    async with opened(api_keys=keys) as (page, _):
        await ask(page)
        await expect(page.locator(".answer .error")).to_contain_text("This gateway wants an API key")
        await expect(page.locator("#key")).to_be_focused()
        await page.fill("#key", "secret")
        await page.click("#settings .main")
        await page.get_by_role("button", name="Retry").click()
        await expect(page.locator(".answer .prose")).to_have_text("Hello world")
        assert await page.evaluate("[document.cookie, localStorage.getItem('key')]") == ["", "secret"]


async def test_a_wrong_key_is_called_wrong_where_it_is_typed(opened: Opened) -> None:
    async with opened(api_keys=[{"name": "a", "key": "secret"}]) as (page, _):
        await expect(page.locator("#model")).to_have_text("API key needed")
        await ask(page)
        await expect(page.locator("#key-error")).to_contain_text("This gateway wants an API key")
        await page.fill("#key", "secert")
        await page.press("#key", "Enter")
        await expect(page.locator("#key-error")).to_have_text("The gateway does not know this key.")
        await expect(page.locator("#key")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.locator("#settings")).to_be_hidden()
        await page.get_by_role("button", name="Retry").click()
        await expect(page.locator("#key-error")).to_have_text("The gateway does not know this key.")
        await page.fill("#key", "secret")
        await page.press("#key", "Enter")
        await expect(page.locator("#model")).to_have_value("glm")
        await expect(page.locator("#log .error")).to_contain_text("does not know this key")  # then
        await page.click("#open-settings")
        await expect(page.locator("#key-error")).to_be_hidden()


async def test_what_is_typed_in_the_settings_outlives_a_refused_key(opened: Opened) -> None:
    answer = asyncio.Event()

    async def late(route: Route) -> None:
        await answer.wait()
        await route.continue_()

    async with opened(api_keys=[{"name": "a", "key": "secret"}]) as (page, _):
        await page.route("**/v1/chat/completions", late)
        await page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "glm"}]}))
        await page.reload()
        await expect(page.locator("#model")).to_have_value("glm")
        await ask(page)
        await page.click("#open-settings")
        await page.fill("#system", "Be brief.")
        answer.set()
        await expect(page.locator("#key")).to_be_focused()
        await expect(page.locator("#system")).to_have_value("Be brief.")


async def test_a_quota_in_chinese(opened: Opened) -> None:
    async def script(_: object) -> AsyncIterator[object]:
        raise QuotaError("Used up.", retry_after_s=55174)
        yield

    async with opened(script, options={"locale": "zh-CN"}) as (page, _):
        await ask(page)
        assert "今天的额度，请在16小时后重试。" in await answered(page)


@pytest.mark.parametrize("key", ["钥匙", "ｓｅｃｒｅｔ", "clé"])
async def test_a_key_of_any_characters_reaches_the_gateway(opened: Opened, key: str) -> None:
    async with opened(api_keys=[{"name": "a", "key": "secret"}, {"name": "b", "key": "钥匙"}]) as (page, _):
        await page.click("#open-settings")
        await page.fill("#key", key)
        await page.click("#settings .main")
        if key != "钥匙":
            await expect(page.locator("#key-error")).to_have_text("The gateway does not know this key.")
            await page.keyboard.press("Escape")
        await ask(page)
        expected = "Hello world" if key == "钥匙" else "The API key is not known."
        assert expected in await answered(page)


async def test_a_key_without_models_in_words(opened: Opened) -> None:
    keys = [{"name": "a", "key": "secret", "models": ["other"]}]
    async with opened(api_keys=keys) as (page, _):
        await page.click("#open-settings")
        await page.fill("#key", "secret")
        await page.click("#settings .main")
        await ask(page)
        assert "Your key allows none of this gateway's models." in await answered(page)


async def test_a_gateway_without_models_in_words(browser: Browser) -> None:
    async with (
        on_socket(FakeUpstream(models=())) as served,
        opened_at(browser, str(served.http.base_url)) as page,
    ):
        await ask(page)
        assert "This gateway has no model yet." in await answered(page)


async def test_tools_that_were_given_up_do_not_hold_the_settings(opened: Opened) -> None:
    async with opened() as (page, _):
        await page.click("#open-settings")
        await page.fill("#tools", "none")
        await page.click("#settings .main")
        assert (
            await page.locator("#tools").evaluate("each => each.validationMessage")
            == "This is not a JSON list."
        )
        await page.keyboard.press("Escape")
        await expect(page.locator("#settings")).to_be_hidden()
        await page.click("#open-settings")
        await expect(page.locator("#tools")).to_have_value("")
        await page.click("#settings .main")
        await expect(page.locator("#settings")).to_be_hidden()


async def test_a_lost_connection_in_words(browser: Browser) -> None:
    fake = FakeUpstream(lambda _: say_and_hang("The first half"))
    async with on_socket(fake) as served, wired(served.http.base_url.port or 0) as (url, wire, server):
        async with opened_at(browser, url + "/") as page:
            await ask(page)
            await expect(page.locator(".answer .prose")).to_have_text("The first half")
            wire.cut()
            shown = await answered(page)
            assert "The first half" in shown
            assert "The connection was lost in the middle of the answer." in shown
            server.close()
            wire.cut()
            await page.get_by_role("button", name="Retry").click()
            await expect(page.locator("#log .error")).to_contain_text("The gateway cannot be reached.")
        await served.until_idle()
