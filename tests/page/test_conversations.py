"""Many conversations, kept in the browser."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from playwright.async_api import Download, Page, Route, expect

from gateway.core.events import Event
from gateway.core.request import Conversation, Generation
from tests.gateway.fake_upstream import say, say_and_hang
from tests.gateway.serving import until
from tests.page.conftest import Opened, answered, ask, echo

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def text_of(file: Download) -> str:
    return await asyncio.to_thread(Path(await file.path()).read_text, encoding="utf-8")


async def test_they_are_kept_found_renamed_exported_and_deleted(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        for text in ("apples", "pears"):
            await page.click("#new")
            await ask(page, text)
            assert f"You said: {text}" in await answered(page)
        await page.reload()
        links = page.locator("#list a")
        await expect(links).to_have_text(["pears", "apples"])
        await page.fill("#search", "said: APPLES")
        await expect(links).to_have_text(["apples"])
        await links.click()
        await expect(page.locator(".answer .prose")).to_have_text("You said: apples")
        await page.fill("#title", "Fruit/1")
        await page.press("#title", "Enter")
        await expect(links).to_have_text(["Fruit/1"])
        async with page.expect_download() as download:
            await page.click("#export")
        file = await download.value
        assert file.suggested_filename == "Fruit 1.md"
        assert "## glm\n\nYou said: apples" in await text_of(file)
        await page.click("#open-settings")
        async with page.expect_download() as download:
            await page.click("#export-all")
        kept = json.loads(await text_of(await download.value))
        assert sorted(each["title"] for each in kept) == ["Fruit/1", "pears"]
        await page.click("#settings .main")
        await page.click("#delete")
        await page.fill("#search", "")
        await expect(links).to_have_text(["pears"])
        await page.get_by_role("button", name="Undo").click()
        await expect(links).to_have_text(["Fruit/1", "pears"])
        await page.click("#delete")
        await expect(links).to_have_text(["pears"])
        await page.reload()
        await expect(links).to_have_text(["pears"])


async def test_a_title_ends_with_a_whole_character(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        await ask(page, "a" * 59 + "😀 and more")
        await expect(page.locator("#list a")).to_have_text("a" * 59 + "😀")


async def test_who_goes_on_at_once_keeps_the_focus(opened: Opened) -> None:
    """What the browser keeps is written later; the page is not moved by that."""
    async with opened(echo) as (page, _):
        await ask(page, "apples")
        await answered(page)
        undo, search = page.get_by_role("button", name="Undo"), page.locator("#search")
        for button, left in (("#delete", 0), ("#toast button", 1)):
            click = f"document.querySelector('{button}').click()"
            await page.evaluate(click + "; document.querySelector('#search').focus()")
            await expect(undo).to_have_count(1 - left)
            await expect(page.locator("#list a")).to_have_count(left)
            await expect(search).to_be_focused()


async def test_editing_and_retrying(opened: Opened) -> None:
    async with opened(echo) as (page, served):
        await ask(page, "one")
        await answered(page)
        await ask(page, "two")
        await answered(page, 2)
        await page.get_by_role("button", name="Retry").last.click()
        await until(lambda: len(served.upstream.requests) == 3)
        assert "You said: two" in await answered(page, 2)
        assert served.upstream.requests[2].prompt == served.upstream.requests[1].prompt
        await page.get_by_role("button", name="Edit").first.click()
        await page.keyboard.press("End")
        await page.keyboard.type(" more")
        await page.keyboard.press("Enter")
        await expect(page.locator(".prose")).to_have_text(["You said: one more"])
        await page.get_by_role("button", name="Undo").click()
        await expect(page.locator(".prose")).to_have_text(["You said: one", "You said: two"])


async def test_a_retried_answer_can_be_had_back(opened: Opened) -> None:
    answers = iter(["better", "worse"])
    async with opened(lambda _: say(next(answers))) as (page, _):
        await ask(page)
        await answered(page)
        await page.get_by_role("button", name="Retry").click()
        await expect(page.locator(".prose")).to_have_text("worse")
        await expect(page.locator("#toast")).to_contain_text("The answer was replaced.")
        await page.get_by_role("button", name="Undo").click()
        await expect(page.locator(".prose")).to_have_text("better")


async def test_a_reload_shows_the_same_conversation(opened: Opened) -> None:
    """Phones leave a page that is out of sight, and load it again when its user comes back."""
    async with opened(echo) as (page, _):
        for text in ("one", "two"):
            await page.click("#new")
            await ask(page, text)
            await answered(page)
        await page.get_by_role("link", name="one").click()
        await page.reload()
        await expect(page.locator(".said")).to_have_text(["one"])
        await expect(page.locator("#list a[aria-current]")).to_have_text("one")
        await expect(page.locator("#question")).to_be_focused()
        await page.click("#new")
        await page.reload()
        await expect(page.locator("#list a")).to_have_count(2)
        await expect(page.locator("#welcome")).to_be_visible()
        await page.get_by_role("link", name="two").click()
        await page.click("#delete")
        await page.reload()
        await expect(page.locator("#list a")).to_have_count(1)
        await expect(page.locator("#welcome")).to_be_visible()


async def test_an_answer_goes_on_while_another_conversation_is_open(opened: Opened) -> None:
    async with opened(lambda _: say_and_hang("Thinking about it")) as (page, served):
        await ask(page, "first")
        await expect(page.locator(".prose")).to_have_text("Thinking about it")
        await page.click("#new")
        await expect(page.locator("#send")).to_be_visible()
        assert served.upstream.running == 1
        await page.get_by_role("link", name="first").click()
        await page.click("#stop")
        assert "Stopped" in await answered(page)
        await served.until_idle()
        assert served.upstream.cancelled == 1


async def test_a_choice_of_model_and_language_is_remembered(opened: Opened) -> None:
    async with opened(echo, options={"locale": "zh-CN"}) as (page, served):
        await expect(page.locator("#question")).to_have_attribute("placeholder", "输入你的问题")
        await page.select_option("#model", "org/glm-2")
        await page.get_by_role("button", name="English").click()
        await page.get_by_role("button", name="Theme").click()
        await page.reload()
        await expect(page.locator("#question")).to_have_attribute("placeholder", "Ask something")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
        await ask(page)
        await answered(page)
        assert served.upstream.requests[0].model == "org/glm-2"


async def test_the_settings_say_that_new_conversations_take_them_over(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        await ask(page)
        await answered(page)
        await page.click("#open-settings")
        await expect(page.locator("#settings legend").first).to_have_text("This conversation and new ones")
        await page.fill("#system", "Be brief.")
        await page.click("#settings .main")
        await page.click("#new")
        await page.click("#open-settings")
        await expect(page.locator("#system")).to_have_value("Be brief.")


FILL = """() => {
  for (let size = 2 ** 23, at = 0; size >= 1; size /= 2) {
    try { localStorage.setItem(`other ${at++}`, "x".repeat(size)); } catch { /* half of it, then */ }
  }
}"""
"""Leave no room for any choice."""


async def test_a_choice_that_the_browser_has_no_room_for_holds_on_this_page(opened: Opened) -> None:
    async with opened(echo) as (page, served):
        await page.evaluate(FILL)
        await page.get_by_role("button", name="Theme").click()
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
        await page.select_option("#model", "org/glm-2")
        await page.click("#open-settings")
        await page.fill("#system", "Be brief. " * 9)
        await page.click("#settings .main")
        await ask(page)
        await answered(page)
        asked = served.upstream.requests[0]
        assert asked.model == "org/glm-2"
        assert [each.role for each in asked.prompt.messages] == ["system", "user"]


async def test_a_question_may_come_before_the_list_of_models(opened: Opened) -> None:
    async with opened(echo) as (page, served):
        await ask(page, "kept")
        await answered(page)
        asked = asyncio.Event()

        async def late(route: Route) -> None:
            await asked.wait()
            await route.continue_()

        await page.route("**/v1/models", late)
        await page.click("#new")
        await page.reload(wait_until="domcontentloaded")
        await ask(page, "early")
        await expect(page.locator("article.question")).to_contain_text(["early"])
        await ask(page, "and at once again")
        asked.set()
        assert "You said: early" in await answered(page)
        await expect(page.locator("#list a")).to_have_text(["early", "kept"])
        await expect(page.locator("#model")).to_have_value("glm")
        assert [request.model for request in served.upstream.requests] == ["glm", "glm"]


async def test_a_list_of_models_that_failed_is_read_again_with_the_question(opened: Opened) -> None:
    async with opened(echo) as (page, served):
        await page.route("**/v1/models", lambda route: route.abort())
        await page.reload()
        await expect(page.locator("#model option")).to_have_text(["no model"])
        await page.unroute("**/v1/models")
        await ask(page)
        await answered(page)
        await expect(page.locator("#model")).to_have_value("glm")
        assert served.upstream.requests[0].model == "glm"


async def second_tab(page: Page, title: str) -> Page:
    """Open the same conversation in another tab."""
    other = await page.context.new_page()
    await other.goto(page.url)
    await other.get_by_role("link", name=title).click()
    return other


async def test_a_tab_follows_what_another_one_writes(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        await ask(page, "one")
        await answered(page)
        other = await second_tab(page, "one")
        await ask(other, "two")
        await answered(other, 2)
        await expect(page.locator(".prose")).to_have_text(["You said: one", "You said: two"])
        await ask(page, "three")
        await answered(page, 3)
        await expect(other.locator(".said")).to_have_text(["one", "two", "three"])
        await page.reload()
        await page.get_by_role("link", name="one").click()
        await expect(page.locator(".said")).to_have_text(["one", "two", "three"])
        await expect(page.locator("#list a")).to_have_count(1)
        await other.fill("#title", "")
        await other.press("#title", "Enter")
        await expect(page.locator("#title")).to_have_value("New conversation")
        await ask(page, "four")
        await expect(other.locator(".said")).to_have_text(["one", "two", "three", "four"])


async def test_what_is_being_typed_outlives_a_change_of_language(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        await ask(page, "one")
        await answered(page)
        await page.get_by_role("button", name="Edit").click()
        await page.fill(".editing textarea", "instead")
        await page.click("#language")
        await expect(page.locator("#send")).to_have_attribute("aria-label", "发送")
        await page.press(".editing textarea", "Enter")
        await expect(page.locator(".prose")).to_have_text("You said: instead")


async def test_who_leaves_in_the_middle_of_an_answer_finds_what_had_arrived(opened: Opened) -> None:
    async with opened(lambda _: say_and_hang("Half of it")) as (page, _):
        await ask(page, "one")
        other = await second_tab(page, "one")
        await expect(other.locator(".prose")).to_have_text("Half of it")  # it was kept
        await page.reload()
        await page.get_by_role("link", name="one").click()
        await expect(page.locator(".prose")).to_have_text("Half of it")
        await expect(page.locator(".stats")).to_contain_text("Stopped")  # and does not pass for the whole


async def test_what_another_tab_deletes_is_gone(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        for text in ("one", "two"):
            await page.click("#new")
            await ask(page, text)
            await answered(page)
        other = await second_tab(page, "two")
        await other.click("#delete")
        await expect(page.locator("#list a")).to_have_text(["one"])
        await expect(page.locator("#log article")).to_have_count(0)
        await other.get_by_role("button", name="Undo").click()
        await expect(page.locator("#list a")).to_have_text(["two", "one"])
        await page.get_by_role("link", name="two").click()
        await page.get_by_role("button", name="Edit").click()
        await other.click("#delete")
        await page.press(".editing textarea", "Enter")  # what was being written goes on
        await expect(other.locator("#list a")).to_have_text(["two", "one"])


async def test_two_tabs_that_write_at_once_keep_both(opened: Opened) -> None:
    def script(request: Generation) -> AsyncGenerator[Event, None]:
        assert isinstance(request.prompt, Conversation)
        slow = request.prompt.messages[-1].content == "slow"
        return say_and_hang("Half of it") if slow else echo(request)

    async with opened(script) as (page, _):
        await ask(page, "one")
        await answered(page)
        other = await second_tab(page, "one")
        await ask(page, "slow")
        await expect(page.locator(".prose").last).to_have_text("Half of it")
        await expect(other.locator(".said")).to_have_text(["one", "slow"])
        await ask(other, "quick")
        await expect(other.locator(".prose").last).to_have_text("You said: quick")
        await page.click("#stop")
        await expect(page.locator("#toast")).to_contain_text("is kept as a copy")
        links = page.locator("#list a")
        await expect(links).to_have_text(["one", "one"])
        await ask(page, "more")  # goes on in the copy
        await expect(page.locator(".prose").last).to_have_text("You said: more")
        await expect(links).to_have_count(2)
        await page.reload()
        await links.first.click()
        await expect(page.locator(".prose")).to_have_text(["You said: one", "Half of it", "You said: more"])
        await links.last.click()
        await expect(page.locator(".said")).to_have_text(["one", "slow", "quick"])
        await expect(page.locator(".prose").last).to_have_text("You said: quick")


async def test_what_is_being_typed_outlives_another_tabs_answer(opened: Opened) -> None:
    async with opened(echo) as (page, _):
        await ask(page, "one")
        await answered(page)
        other = await second_tab(page, "one")
        await page.get_by_role("button", name="Edit").click()
        await page.fill(".editing textarea", "instead")
        await ask(other, "two")
        await answered(other, 2)
        await expect(page.locator(".editing textarea")).to_have_value("instead")
        await page.press(".editing textarea", "Enter")
        await expect(page.locator(".prose")).to_have_text("You said: instead")
        await expect(page.locator("#toast")).to_contain_text("is kept as a copy")
        await expect(page.locator("#list a")).to_have_count(2)
        await expect(other.locator(".said")).to_have_text(["one", "two"])
        await expect(other.locator("#list a")).to_have_count(2)
