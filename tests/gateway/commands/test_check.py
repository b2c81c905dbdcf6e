import asyncio
import socket

from gateway.commands.check import check
from gateway.process.listeners import bind
from tests.gateway.serving import settings
from tests.gateway.triton.fake_resolver import FakeResolver
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton


async def test_all_is_well(triton: FakeTriton) -> None:
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert [finding.text for finding in findings] == [
        f"upstream {triton.address}: live",
        "  model m: ready, format chatglm3, context 512 tokens",
    ]
    assert all(finding.ok for finding in findings)


async def test_published_faults_are_told_and_are_no_failure(triton: FakeTriton) -> None:
    triton.version = "2.51.0"
    findings = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert findings[1].text.startswith("  warning: Triton 2.51.0 has published faults: ")
    assert "first release without them is 26.07" in findings[1].text
    assert all(finding.ok for finding in findings)


async def test_a_model_that_is_not_there(triton: FakeTriton) -> None:
    triton.models["n"] = FakeModel(state="UNAVAILABLE")
    findings = await check(settings(upstreams=[triton.address], models=["m", "n"]), timeout_s=10)
    assert [finding.ok for finding in findings] == [True, True, False, False]
    assert findings[-1].text == "model n: ready on no upstream"


async def test_no_models(triton: FakeTriton) -> None:
    triton.models.clear()
    findings = await check(settings(upstreams=[triton.address]), timeout_s=3)
    assert [finding.ok for finding in findings] == [True, False]


async def test_names_are_looked_up(triton: FakeTriton) -> None:
    resolver = FakeResolver(triton=[triton.address], nobody=[], failing=socket.gaierror(-3, "no server"))
    names = ["dns:///triton:1", triton.address, "dns:///nobody:1", "dns:///failing:1"]
    findings = await check(settings(upstreams=names), timeout_s=10, resolve=resolver)
    assert [(finding.ok, finding.text) for finding in findings] == [
        (True, f"upstream dns:///triton:1: {triton.address}"),
        (False, "upstream dns:///nobody:1: has no addresses"),
        (False, "upstream dns:///failing:1: cannot be looked up (no server)"),
        (True, f"upstream {triton.address}: live"),
        (True, "  model m: ready, format chatglm3, context 512 tokens"),
    ]


async def test_a_name_that_nobody_looks_up_in_time() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    findings = await check(settings(upstreams=["dns:///triton:1"]), timeout_s=0.1, resolve=never)
    assert findings[0].text == "upstream dns:///triton:1: not looked up within 0.1 s"


async def test_a_repository_that_is_restricted(triton: FakeTriton) -> None:
    triton.restriction = ("triton-grpc-protocol-admin-key", "s3cret")
    (found,) = await check(settings(upstreams=[triton.address]), timeout_s=10)
    assert not found.ok
    assert "not_permitted" in found.text
    assert "repository_key" in found.text
    findings = await check(
        settings(upstreams=[triton.address], repository_key="admin-key=s3cret"), timeout_s=10
    )
    assert all(finding.ok for finding in findings)
    # What is named need not be listed.
    findings = await check(settings(upstreams=[triton.address], models=["m"]), timeout_s=10)
    assert all(finding.ok for finding in findings)


async def test_nobody_answers() -> None:
    with bind("127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        findings = await check(settings(upstreams=[address]), timeout_s=2)
    (found,) = findings  # nothing was asked for its models, so nothing is said of them
    assert (found.ok, found.text) == (False, f"upstream {address}: unreachable")
