"""Without a mouse, and for screen readers."""

import json
from collections.abc import AsyncGenerator
from importlib.resources import files

import pytest
from playwright.async_api import Page, expect

from gateway.core.events import CallPart, Event
from gateway.core.request import Conversation, Generation
from tests.gateway.fake_upstream import say, say_and_hang
from tests.page.conftest import TOOLS, Opened, answered, ask, echo, pieces

pytestmark = pytest.mark.asyncio(loop_scope="session")

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
ANSWER = (
    "# Title\n\n[link](https://example.org) and `code`\n\n```python\n"
    + "x" * 300
    + "\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
)


async def violations(page: Page) -> list[str]:
    found = await page.evaluate("async () => (await axe.run()).violations")
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize(("scheme", "locale"), [("light", "zh-CN"), ("dark", "en-GB")])
async def test_axe_finds_nothing(opened: Opened, size: dict[str, int], scheme: str, locale: str) -> None:
    options = {"viewport": size, "color_scheme": scheme, "locale": locale}
    async with opened(lambda _: say(ANSWER), options=options) as (page, _):
        await page.evaluate(AXE)
        assert await violations(page) == []
        await ask(page)
        await answered(page)
        assert await violations(page) == []
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await page.click("#open-settings")
        assert await violations(page) == []
        await page.keyboard.press("Escape")
        await page.evaluate("location.hash = '#load'")
        await expect(page.locator("#models tr")).to_have_count(2)
        assert await violations(page) == []
        if size is PHONE:
            await page.click("#menu")
            assert await violations(page) == []


async def test_words_of_the_bar_stay_on_one_line(opened: Opened) -> None:
    """Chinese may break between any two characters, and did where a model's name left little room."""
    models = ("a-model-with-a-long-name-chat-int4",)
    options = {"viewport": {"width": 320, "height": 640}, "locale": "zh-CN"}
    async with opened(models=models, options=options) as (page, _):
        lines = "(a) => a.clientHeight / parseFloat(getComputedStyle(a).lineHeight)"
        assert max(await page.evaluate(f"[...document.querySelectorAll('.tabs a')].map({lines})")) < 2
        assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await expect(page.locator("#open-settings")).to_be_in_viewport(ratio=1)


async def tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    for _ in range(40):
        if await page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        await page.keyboard.press(key)
    raise AssertionError(f"no way to {selector}")


async def test_everything_by_keyboard(opened: Opened) -> None:
    async with opened(lambda request: say("Well") if request.max_tokens == 5 else say_and_hang("Long")) as (
        page,
        served,
    ):
        keyboard = page.keyboard
        await expect(page.locator("#question")).to_be_focused()
        await keyboard.type("first line")
        await keyboard.press("Shift+Enter")
        await keyboard.type("second")
        await keyboard.press("Enter")
        await expect(page.locator(".said")).to_have_text("first line\nsecond")
        await expect(page.locator(".prose")).to_have_text("Long")
        await keyboard.press("Escape")
        await answered(page)
        await served.until_idle()
        await tab_to(page, "#open-settings", "Shift+Tab")
        await keyboard.press("Enter")
        await tab_to(page, "#max_tokens")
        await keyboard.type("5")
        await keyboard.press("Enter")
        await expect(page.locator("#settings")).to_be_hidden()
        await tab_to(page, ".answer .under button:last-of-type")
        await keyboard.press("Enter")
        await expect(page.locator(".prose")).to_have_text("Well")
        await keyboard.press("Control+k")
        await expect(page.locator("#search")).to_be_focused()
        await keyboard.type("nowhere")
        await expect(page.locator("#none")).to_have_text("Nothing found.")
        await keyboard.press("Control+a")
        await keyboard.type("line")
        await keyboard.press("ArrowDown")
        await keyboard.press("Enter")
        await expect(page.locator("#question")).to_be_focused()
        await tab_to(page, ".tabs a[href='#load']", "Shift+Tab")
        await keyboard.press("Enter")
        await expect(page.locator("#load-view")).to_be_visible()


async def test_a_conversation_by_keyboard(opened: Opened) -> None:
    async with opened(echo) as (page, served):
        keyboard = page.keyboard
        await tab_to(page, "#model", "Shift+Tab")
        await keyboard.press("ArrowDown")
        await tab_to(page, "#question")
        await keyboard.type("apple")
        await keyboard.press("Enter")
        await answered(page)
        assert served.upstream.requests[0].model == "org/glm-2"
        await tab_to(page, ".question .under button:first-of-type", "Shift+Tab")
        await keyboard.press("Enter")
        await keyboard.press("End")
        await keyboard.type(" pie")
        await tab_to(page, ".editing button:not(.main)")  # to cancel
        await keyboard.press("Enter")
        await expect(page.locator(".said")).to_have_text("apple")
        await keyboard.press("Enter")
        await keyboard.press("End")
        await keyboard.type("s")
        await keyboard.press("Enter")
        await expect(page.locator(".prose")).to_have_text("You said: apples")
        assert len(served.upstream.requests) == 2
        await answered(page)
        await tab_to(page, "#title", "Shift+Tab")
        await keyboard.press("Control+a")
        await keyboard.type("Fruit")
        await keyboard.press("Enter")
        await expect(page.locator("#question")).to_be_focused()
        await expect(page.locator("#list a")).to_have_text("Fruit")
        await tab_to(page, "#export", "Shift+Tab")
        async with page.expect_download() as download:
            await keyboard.press("Enter")
        assert (await download.value).suggested_filename == "Fruit.md"
        await tab_to(page, "#delete")
        await keyboard.press("Enter")
        await expect(page.locator("#list a")).to_have_count(0)
        await tab_to(page, "#toast button")
        await keyboard.press("Enter")
        await expect(page.locator("#list a")).to_have_text("Fruit")


async def test_a_call_gets_its_result_by_keyboard(opened: Opened) -> None:
    def script(request: Generation) -> AsyncGenerator[Event, None]:
        assert isinstance(request.prompt, Conversation)
        if request.prompt.messages[-1].role == "tool":
            return echo(request)
        return pieces(CallPart("weather", '{"city":"Oslo"}'), finish="tool_calls")

    async with opened(script) as (page, _):
        keyboard = page.keyboard
        await tab_to(page, "#open-settings", "Shift+Tab")
        await keyboard.press("Enter")
        await tab_to(page, "#tools")
        await keyboard.insert_text(json.dumps(TOOLS))
        await tab_to(page, "#settings .main")
        await keyboard.press("Enter")
        await tab_to(page, "#question")
        await keyboard.type("Is it raining?")
        await keyboard.press("Enter")
        await expect(page.locator(".results textarea")).to_be_focused()
        await keyboard.type("rain")
        await tab_to(page, ".results .main")
        await keyboard.press("Enter")
        await expect(page.locator(".prose")).to_have_text("You said: rain")


async def press_composing(page: Page, selector: str, key: str, told: str) -> None:
    """Press a key that is an input method's, which says so by `told`."""
    await page.focus(selector)
    pressed = f"new KeyboardEvent('keydown', {{key: '{key}', {told}, bubbles: true, cancelable: true}})"
    await page.evaluate(f"document.querySelector('{selector}').dispatchEvent({pressed})")


TOLD = pytest.mark.parametrize("told", ["isComposing: true", "keyCode: 229"])  # the second: Safari


@TOLD
async def test_enter_of_an_input_method_does_not_send(opened: Opened, told: str) -> None:
    async with opened() as (page, served):
        await page.fill("#question", "ni hao")
        await press_composing(page, "#question", "Enter", told)
        await expect(page.locator("#question")).to_have_value("ni hao")
        assert served.upstream.requests == []
        await page.keyboard.press("Enter")
        for selector in ("#title", "#search"):
            await press_composing(page, selector, "Enter", told)
            await expect(page.locator(selector)).to_be_focused()
        await press_composing(page, "#search", "ArrowDown", told)
        await expect(page.locator("#search")).to_be_focused()


@TOLD
async def test_escape_of_an_input_method_neither_stops_nor_gives_up(opened: Opened, told: str) -> None:
    async with opened(lambda _: say_and_hang("Half of it")) as (page, _):
        await ask(page)
        await expect(page.locator(".prose")).to_have_text("Half of it")
        await press_composing(page, "#question", "Escape", told)
        await expect(page.locator("#stop")).to_be_visible()
        await page.get_by_role("button", name="Edit").click()
        await page.fill(".editing textarea", "instead")
        await press_composing(page, ".editing textarea", "Escape", told)
        await expect(page.locator(".editing textarea")).to_have_value("instead")
        await page.keyboard.press("Escape")
        await expect(page.locator(".editing")).to_have_count(0)


async def test_enter_of_a_touch_keyboard_begins_a_line(opened: Opened) -> None:
    """It has no Shift+Enter, and the page has a button that sends. With Ctrl, Enter sends on any."""
    options = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
    async with opened(echo, options=options) as (page, served):
        question = page.locator("#question")
        await question.press_sequentially("one")
        await question.press("Enter")
        await question.press_sequentially("two")
        await expect(question).to_have_value("one\ntwo")
        assert served.upstream.requests == []
        await page.tap("#send")
        await answered(page)
        await expect(page.locator(".said")).to_have_text("one\ntwo")
        await question.fill("three")
        await question.press("Control+Enter")
        await expect(page.locator(".prose").last).to_have_text("You said: three")
