from collections.abc import AsyncIterator

import pytest

from gateway.check import check
from gateway.server import bind
from tests.gateway.serving import settings
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    triton = FakeTriton()
    await triton.start()
    yield triton
    await triton.stop()


async def test_all_is_well(triton: FakeTriton) -> None:
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert [finding.text for finding in findings] == [
        f"upstream {triton.address}: live",
        "  model m: ready, format chatglm3, context 512 tokens",
    ]
    assert all(finding.ok for finding in findings)


async def test_a_model_that_is_not_there(triton: FakeTriton) -> None:
    triton.models["n-stream"] = FakeModel(state="UNAVAILABLE")
    findings = await check(settings(upstreams=[triton.address], models=["m", "n"]), timeout_s=10)
    assert [finding.ok for finding in findings] == [True, True, False, False]
    assert findings[-1].text == "model n: ready on no upstream"


async def test_no_models(triton: FakeTriton) -> None:
    triton.models.clear()
    findings = await check(settings(upstreams=[triton.address]), timeout_s=0.5)
    assert [finding.ok for finding in findings] == [True, False]


async def test_nobody_answers() -> None:
    with bind("127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        findings = await check(settings(upstreams=[address]), timeout_s=2)
    assert not findings[0].ok
    assert "unreachable" in findings[0].text
