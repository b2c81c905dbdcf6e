"""The view Load."""

import pytest
from playwright.async_api import expect

from gateway.telemetry.metrics import UpstreamState
from tests.gateway.fake_upstream import say_and_hang
from tests.gateway.serving import until
from tests.page.conftest import Opened, ask

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_what_runs_is_shown(opened: Opened) -> None:
    async with opened(lambda _: say_and_hang("a")) as (page, served):
        down = UpstreamState(model="glm", upstream="triton:8001", healthy=False)
        served.gateway.metrics.upstreams.look = lambda: [down]
        await ask(page)
        await expect(page.locator(".prose")).to_have_text("a")
        await page.click(".tabs a[href='#load']")
        await expect(page.locator(".figure").first).to_have_text("1")
        await expect(page.locator("#models tr").first).to_contain_text("glm")
        await expect(page.locator("#models tr").first).to_contain_text("ready")
        await expect(page.locator("#tritons tr")).to_contain_text("does not answer")
        await expect(page.locator(".tile .line").first).to_be_attached()  # two looks make a line
        label = await page.locator(".tile svg").first.get_attribute("aria-label")
        assert label == "Running: now 1, highest 1"
        await page.click(".tabs a[href='#chat']")
        await page.click("#stop")
        await served.until_idle()


async def test_a_phone_scrolls_the_tables_not_the_page(opened: Opened) -> None:
    options = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    async with opened(path="/#load", models=("a-model-with-a-long-name-chat",), options=options) as (page, _):
        await expect(page.locator("#models tr")).to_have_count(1)
        assert await page.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [360, 360]


async def test_admins_load_and_unload(opened: Opened) -> None:
    async with opened(path="/#load") as (page, served):
        page.once("dialog", lambda dialog: dialog.dismiss())
        await page.get_by_role("button", name="Unload glm").click()
        assert served.upstream.changes == []
        page.once("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Unload glm").click()
        await until(lambda: served.upstream.changes == [("unload", "glm", False, None)])
        await expect(page.locator("#models tr").first).to_contain_text("not loaded")
        await page.get_by_role("button", name="Load glm").click()
        await until(lambda: len(served.upstream.changes) == 2)


async def test_a_model_may_have_any_name(opened: Opened) -> None:
    name = "org/glm 4?#%2F"
    async with opened(path="/#load", models=(name,)) as (page, served):
        page.once("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name=f"Unload {name}").click()
        await until(lambda: served.upstream.changes == [("unload", name, False, None)])


async def test_others_are_told_that_they_may_not(opened: Opened) -> None:
    keys = [{"name": "user", "key": "secret", "scopes": ["inference"]}]
    async with opened(path="/#load", api_keys=keys) as (page, served):
        await expect(page.locator("#load-error")).to_contain_text("This gateway wants an API key")
        await page.evaluate("localStorage.setItem('key', 'secret')")
        page.once("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Unload org/glm-2").click()
        await expect(page.locator("#load-error")).to_contain_text("Your key does not allow this.")
        assert served.upstream.changes == []
