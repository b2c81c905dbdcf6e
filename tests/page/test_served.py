"""The page of a real `tritongate up`."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route, expect

from tests.e2e.up_process import GOLDEN, UpProcess, wait_until
from tests.page.conftest import answered, ask, opened_at

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

DEMO = Path(__file__).parents[2] / "triton_models" / "checkpoints" / "chatglm3-demo"
LONG = "chatglm3"
RUNNING = "tritongate_engine_requests_running"


@pytest.fixture(scope="module")
def served(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """The model that talks sense, and one whose answers may be long; not before there is a browser."""
    folder = tmp_path_factory.mktemp("long") / LONG
    shutil.copytree(GOLDEN / "chatglm3", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"seq_length": 8192}), encoding="utf-8")
    process = UpProcess("--model", str(DEMO), "--model", str(folder), "--dtype", "float32")
    try:
        yield process.wait_ready()
    finally:
        process.close()


async def endless(route: Route) -> None:
    await route.continue_(post_data=json.dumps({**(route.request.post_data_json or {}), "ignore_eos": True}))


async def test_a_conversation(served: UpProcess, browser: Browser) -> None:
    async with opened_at(browser, served.base_url) as page:
        await page.select_option("#model", DEMO.name)
        await page.click("#open-settings")
        await page.fill("#temperature", "0")
        await page.click("#settings .main")
        await ask(page, "What is tritongate?")
        assert "OpenAI" in await answered(page)
        await ask(page, "17 times 13")
        answer = await answered(page, 2)
        assert "221" in answer
        assert "tokens · first after" in answer
        await page.click(".tabs a[href='#load']")
        await expect(page.locator("#tritons tr")).to_have_count(2)
        await expect(page.locator("#tritons tr").first).to_contain_text("healthy")
        await expect(page.locator("#tritons tr").first).to_contain_text("%")


async def test_a_stop_in_the_middle_frees_the_engine(served: UpProcess, browser: Browser) -> None:
    async with opened_at(browser, served.base_url) as page:
        await page.select_option("#model", LONG)
        # Or the model might be done before anybody sees it run.
        await page.route("**/chat/completions", endless)
        cancelled = served.gauge("tritongate_client_cancels_total", model=LONG)
        await ask(page, "你好")
        await page.locator(".answer .prose").wait_for()
        await asyncio.to_thread(wait_until, lambda: served.gauge(RUNNING, model=LONG) == 1)
        await page.keyboard.press("Escape")
        assert "Stopped" in await answered(page)
        await asyncio.to_thread(wait_until, lambda: served.gauge(RUNNING, model=LONG) == 0)
        assert served.gauge("tritongate_client_cancels_total", model=LONG) == cancelled + 1
        assert served.gauge("tritongate_engine_kv_blocks_used", model=LONG) == 0
