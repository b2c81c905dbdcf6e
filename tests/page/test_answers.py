"""How answers look, and that what a model writes is text, whatever it writes."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from playwright.async_api import Browser, Error, expect

from gateway.core.events import CallPart, Event, Reasoning
from gateway.core.request import Conversation, Generation
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import on_socket
from tests.page.conftest import TOOLS, Opened, answered, ask, opened_at, pieces

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = """
<script>window.broken = 1</script><img src=x onerror="window.broken = 2">
<svg onload="window.broken = 3"></svg>
<iframe srcdoc="<script>parent.broken = 4</script>"></iframe><style>body { display: none }</style>

[run](javascript:window.broken=5) [data](data:text/html,<script>opener.broken=6</script>) [v](vbscript:x)
[tab](java&#9;script:window.broken=7) [fine](https://example.org/"onmouseover="window.broken=8)
![shot](https://tracker.example/pixel.png) <a href="javascript:window.broken=9">raw</a>

```"><script>window.broken=10</script>
</code></pre><script>window.broken = 11</script>
```

<form action="https://tracker.example"><input name=a><button>x</button></form>
"""


async def test_hostile_answers_stay_inert(opened: Opened) -> None:
    async with opened(lambda _: pieces(Reasoning(HOSTILE), HOSTILE)) as (page, _):
        outside: list[str] = []
        page.on("request", lambda request: outside.append(request.url))
        await ask(page, HOSTILE)
        await answered(page)
        await page.locator(".thoughts summary").click()
        outside.clear()
        for link in await page.locator(".answer a").all():
            address = await link.get_attribute("href")
            assert address is None or address.startswith("https://"), address
            assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
            await link.hover()
        await asyncio.sleep(0.3)
        assert await page.evaluate("window.broken") is None
        assert outside == []
        made = "#log :is(script, img, iframe, style, form:not(.editing), input, object, svg)"
        assert await page.locator(made).count() == 0
        assert (
            await page.evaluate(
                "[...document.querySelectorAll('#log *')].flatMap(e => e.getAttributeNames())"
                ".filter(name => name.startsWith('on') || name === 'style')"
            )
            == []
        )
        assert "window.broken = 1" in await page.locator(".said").inner_text()


async def test_the_policy_stops_what_would_come_past_the_cleaning(browser: Browser) -> None:
    async with on_socket(FakeUpstream()) as served:
        page = await browser.new_page()
        await page.goto(str(served.http.base_url))
        for attempt in ("innerHTML = '<b>x</b>'", "insertAdjacentHTML('beforeend', '<b>x</b>')"):
            with pytest.raises(Error, match="TrustedHTML"):
                await page.evaluate(f"document.body.{attempt}")
        await page.evaluate("document.body.append(document.createElement('a'))")
        await page.evaluate("document.body.lastChild.setAttribute('href', 'javascript:window.broken=1')")
        await page.evaluate("document.body.lastChild.click()")
        await page.wait_for_timeout(200)
        assert await page.evaluate("window.broken") is None
        await page.close()


async def test_markdown_code_and_tables(opened: Opened) -> None:
    text = "# Title\n\nsome **bold**\n\n```python\nprint(1)\n```\n\n| a | b |\n| - | -: |\n| 1 | 2 |\n"
    async with opened(lambda _: say(*text)) as (page, _):
        await ask(page)
        await answered(page)
        answer = page.locator(".answer")
        assert await answer.locator("h3").inner_text() == "Title"
        assert await answer.locator("strong").inner_text() == "bold"
        assert await answer.locator("pre code.language-python").inner_text() == "print(1)\n"
        assert await answer.locator("td.right").inner_text() == "2"
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await answer.locator(".block button").click()
        await expect(answer.locator(".block button")).to_have_text("Copied")
        assert await page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
        stats = await answer.locator(".stats").inner_text()
        assert stats.startswith(f"{len(text)} tokens · first after ")
        assert stats.endswith(" tokens/s")


async def test_what_is_finished_stays_while_the_rest_is_written(opened: Opened) -> None:
    """A press, a selection and the focus need an element that stays where it is."""
    more = ["first\n\n", "```python\nprint(1)\n```\n\n", *("word " for _ in range(2000))]
    async with opened(lambda _: say(*more, gap_s=0.01)) as (page, _):
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await ask(page)
        await page.locator(".answer p").filter(has_text="word").wait_for()
        await page.locator(".answer p").first.select_text()
        before = len(await page.locator(".answer").inner_text())
        await page.locator(".block button").click(delay=300)
        await expect(page.locator(".block button")).to_have_text("Copied")
        await page.locator(".block pre").focus()
        await page.wait_for_timeout(300)
        await expect(page.locator(".block pre")).to_be_focused()
        assert str(await page.evaluate("String(getSelection())")).strip() == "first"
        assert len(await page.locator(".answer").inner_text()) > before
        await page.click("#stop")
        await expect(page.locator(".answer .stats")).to_contain_text("Stopped")
        assert await page.evaluate("navigator.clipboard.readText()") == "print(1)\n"


async def test_what_was_written_in_parts_is_what_is_drawn_at_once(opened: Opened) -> None:
    parts = (
        "# A\n\npara *it",
        "al* and **bo",
        "ld** `co",
        "de` [li",
        "nk](https://e.org/a",
        "b) end\n\n- a\n- b\n",
    )
    more = (
        "  - c\n- d\n\n1. x\n2. y\n\n```py",
        "thon\nx=1\n",
        "y=2\n``",
        "`\n\n| a | b",
        " |\n|---|--",
        "-|\n| 1 | 2",
    )
    last = (" |\n\n> quo", "te\n\nsetext\n==", "==\n\nhttps://e.org/x", "yz\n\n## B\n\n### C\n\n# D\n")
    async with opened(lambda _: say(*parts, *more, *last, gap_s=0.1)) as (page, _):
        await ask(page)
        await answered(page)
        written = await page.locator(".answer").inner_html()
        for _ in range(2):
            await page.click("#language")  # draws everything anew
        assert await page.locator(".answer").inner_html() == written


async def test_copying_needs_no_https(browser: Browser) -> None:
    """Browsers have `navigator.clipboard` on https and loopback alone; a gateway in an office has neither."""
    async with (
        on_socket(FakeUpstream(), allowed_hosts="rebound.example") as served,
        opened_at(browser, f"http://rebound.example:{served.http.base_url.port}/") as page,
    ):
        await ask(page)
        await answered(page)
        copy = page.locator(".answer").get_by_role("button", name="Cop")
        await copy.click()
        await expect(copy).to_have_text("Copied")
        await expect(copy).to_be_focused()
        await page.focus("#question")
        await page.keyboard.press("ControlOrMeta+V")
        await expect(page.locator("#question")).to_have_value("Hello world")
        await expect(page.locator("body > textarea")).to_have_count(0)


async def test_the_speed_is_the_servers_where_chunks_arrive_together(opened: Opened) -> None:
    """A busy browser or a proxy gets many chunks at once: by the browser's clock these took no time."""
    async with opened(lambda _: say(*"abcde", gap_s=0.05)) as (page, _):
        await page.evaluate(
            "() => { const get = fetch; window.fetch = async (...asked) => {"
            " const got = await get(...asked); return new Response(await got.text(), got); }; }"
        )
        await ask(page)
        await answered(page)
        stats = await page.locator(".stats").inner_text()
        assert stats.endswith(" tokens/s"), stats
        assert float(stats.split(" · ")[-1].split()[0].replace(",", "")) <= 21, stats


async def test_reasoning_is_folded(opened: Opened) -> None:
    async with opened(lambda _: pieces(Reasoning("because"), "so")) as (page, _):
        await ask(page)
        await answered(page)
        thoughts = page.locator(".thoughts")
        await expect(thoughts.locator(".prose")).to_be_hidden()
        await thoughts.locator("summary").click()
        await expect(thoughts.locator(".prose")).to_have_text("because")


async def test_calls_are_shown_and_their_results_go_back(opened: Opened) -> None:
    seen: list[Generation] = []

    def script(request: Generation) -> AsyncGenerator[Event, None]:
        seen.append(request)
        if len(seen) > 1:
            return say("It rains.")
        call = (CallPart("weather", '{"city":'), CallPart(None, '"Oslo"}'))
        return pieces(*call, CallPart("weather", '{"city":"Rome"}'), finish="tool_calls")

    async with opened(script) as (page, _):
        await page.click("#open-settings")
        await page.fill("#tools", json.dumps(TOOLS))
        await page.fill("#system", "Be brief.")
        await page.fill("#temperature", "0.5")
        await page.fill("#max_tokens", "9")
        await page.click("#settings .main")
        await ask(page, "Weather?")
        await answered(page)
        assert await page.locator(".call .name").all_inner_texts() == ["weather", "weather"]
        assert '"city": "Oslo"' in await page.locator(".call pre").first.inner_text()
        await page.keyboard.type("rain")  # the form has the focus
        await page.locator(".results textarea").last.fill("sun")
        await page.locator(".results .main").click()
        assert "It rains." in await answered(page, 2)
        assert await page.locator(".results").count() == 0
        asked = seen[1].prompt
        assert isinstance(asked, Conversation)
        assert [message.content for message in asked.messages if message.role == "tool"] == ["rain", "sun"]
        assert asked.messages[0].content == "Be brief."
        assert (seen[1].temperature, seen[1].max_tokens) == (0.5, 9)


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_call_without_a_result_is_not_sent_back(opened: Opened, stopped: bool) -> None:
    """Models take each call with its result: a question in its place failed, and so did all later ones."""
    seen: list[Generation] = []
    hang = asyncio.Event()

    async def script(request: Generation) -> AsyncGenerator[Event, None]:
        seen.append(request)
        if len(seen) > 1:
            answer = say("It rains.")
        else:
            answer = pieces("I look.", CallPart("weather", '{"city":'), finish="tool_calls")
        async for event in answer:
            if stopped and getattr(event, "finish_reason", None) == "tool_calls":
                await hang.wait()
            yield event

    async with opened(script) as (page, _):
        await page.click("#open-settings")
        await page.fill("#tools", json.dumps(TOOLS))
        await page.click("#settings .main")
        await ask(page, "Weather?")
        await page.locator(".call .name").wait_for()
        if stopped:
            await page.keyboard.press("Escape")
        await answered(page)
        await ask(page, "Never mind.")
        await answered(page, 2)
        asked = seen[1].prompt
        assert isinstance(asked, Conversation)
        assert [each.content for each in asked.messages] == ["Weather?", "I look.", "Never mind."]
        assert not any(each.calls for each in asked.messages)
