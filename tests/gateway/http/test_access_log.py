import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from msgspec import structs

from gateway.app import create_app
from gateway.core.events import Delta, Event
from gateway.core.request import Generation
from gateway.http.record import BODY_LIMIT_BYTES
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.tracing import current_trace
from gateway.triton.errors import Fault, TritonError
from tests.gateway.fake_upstream import FakeUpstream, say, say_choices
from tests.gateway.serving import CHAT, MESSAGES, Served, in_process, on_socket, settings, until
from tests.ports import free_ports

SECRET = "sk-very-secret"
PROMPT = "tell nobody about the harbour"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"authorization": f"Bearer {SECRET}", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
KEYS = [{"name": "anna", "key": SECRET}]


pytestmark = pytest.mark.usefixtures("restored_logging")


async def ask(served: Served, **parameters: Any) -> Any:
    body = {"model": "glm", "messages": [{"role": "user", "content": PROMPT}], **parameters}
    return await served.http.post(CHAT, json=body, headers=HEADERS)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    written = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    return [line for line in written if line["logger"] == "gateway.access"]


async def called(_: Generation) -> AsyncIterator[Event]:
    current_trace.get().calls.append(["triton-a:8001", "triton-b:8001"])
    async for event in say("a", "b", finish="length"):
        yield event


async def test_a_key_without_the_scope_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        refused = await served.http.post("/v1/models/glm/unload", headers=HEADERS)
        assert refused.status_code == 403
        assert served.metric("key_requests_total", key="anna", model="unknown", status="403") == 1
    (line,) = lines(capsys)
    assert (line["key"], line["status"], line["error"]) == ("anna", 403, "PermissionDeniedError")


async def test_whether_a_key_was_missing_or_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        for headers in ({}, {"authorization": "Bearer sk-other"}):
            assert (await served.http.get("/v1/models", headers=headers)).status_code == 401
    assert [(line["status"], line["reason"]) for line in lines(capsys)] == [
        (401, "no_key"),
        (401, "unknown_key"),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_all_that_is_known(capsys: pytest.CaptureFixture[str], *, stream: bool) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(called), api_keys=KEYS) as served:
        answer = await ask(served, stream=stream)
    (line,) = lines(capsys)
    times = {name: line.pop(name) for name in list(line) if name.endswith("_ms")}
    assert set(times) == {"duration_ms", "queued_ms", "waited_ms", "first_token_ms", "generation_ms"}
    assert 0 <= times["queued_ms"] <= times["first_token_ms"] <= times["duration_ms"]
    assert 0 <= times["generation_ms"] <= times["duration_ms"] - times["first_token_ms"] + 0.002  # rounded
    line.pop("time")
    assert line == {
        "level": "INFO",
        "logger": "gateway.access",
        "message": "request",
        "request_id": answer.headers["x-request-id"],
        "trace_id": TRACE_ID,
        "client": "127.0.0.1",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "key": "anna",
        "model": "glm",
        "stream": stream,
        "prompt_tokens": 3,
        "generated_tokens": 2,
        "finish_reason": "length",
        "upstream": "triton-b:8001",
        "attempts": 2,
    }


async def waited_in_the_engine(_: Generation) -> AsyncIterator[Event]:
    async for event in say("a"):
        if isinstance(event, Delta) and event.usage is not None:
            yield structs.replace(event, usage=replace(event.usage, queue_s=0.25))
        else:
            yield event


async def test_the_time_in_an_engines_queue_where_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    for answer, queued in ((waited_in_the_engine, {"engine_queued_ms": 250.0}), (called, {})):
        async with in_process(FakeUpstream(answer), api_keys=KEYS) as served:
            await ask(served)
        (line,) = lines(capsys)
        assert {name: line[name] for name in line if name == "engine_queued_ms"} == queued


async def test_a_tokenization_is_no_generation(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=KEYS) as served:
        await served.http.post("/tokenize", json={"model": "glm", "prompt": "a"}, headers=HEADERS)
    (line,) = lines(capsys)
    assert line["model"] == "glm"
    assert line.keys() >= {"queued_ms", "waited_ms"}
    assert not line.keys() & {"stream", "prompt_tokens", "generated_tokens"}


async def test_the_tritons_of_several_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    tried = {"one": ["a:1"], "two": ["b:1", "a:1", "c:1"], "three": ["a:1"], "four": ["b:1", "c:1"]}

    async def say_tried(request: Generation) -> AsyncIterator[Event]:
        current_trace.get().calls.append(tried[request.prompt.text])
        async for event in say("a"):
            yield event

    configure_logging("info")
    async with in_process(FakeUpstream(say_tried), api_keys=KEYS) as served:
        body = {"model": "glm", "prompt": list(tried)}
        await served.http.post("/v1/completions", json=body, headers=HEADERS)
    (line,) = lines(capsys)
    # Each Triton that answered once, in the order of the prompts; the most tries that any prompt needed.
    assert (line["upstream"], line["attempts"]) == ("a:1,c:1", 3)


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.NOT_READY, Fault.UNREACHABLE, Fault.INTERNAL])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_has_the_code_of_metrics(
    capsys: pytest.CaptureFixture[str], fault: Fault, *, stream: bool
) -> None:
    async def fail(_: Generation) -> AsyncIterator[Event]:
        raise TritonError(fault, "secret").to_gateway()
        yield

    configure_logging("info")
    async with in_process(FakeUpstream(fail), api_keys=KEYS) as served:
        await ask(served, stream=stream)
    (line,) = lines(capsys)
    assert (line["error"], line["reason"]) == (fault.value.error.__name__, fault.code)
    assert "secret" not in str(line)


async def test_a_request_without_a_triton_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    app = create_app(settings(upstreams=f"127.0.0.1:{free_ports(1)[0]}", models="glm"))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        await until(
            lambda: {each.state for _, each in app.state.gateway.upstream.replicas()} == {"unreachable"}
        )
        await http.post(CHAT, json={"model": "glm", "messages": MESSAGES})
    (line,) = lines(capsys)
    assert (line["status"], line["reason"]) == (503, "unreachable")


async def test_a_request_turned_away_has_the_reason_of_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=[KEYS[0] | {"requests_per_minute": 1}]) as served:
        await ask(served)
        await ask(served)
        assert served.metric("requests_rejected_total", model="unknown", reason="key_limit") == 1
        served.gateway.drain.begin()
        await ask(served)
        assert served.metric("requests_rejected_total", model="unknown", reason="draining") == 1
    assert [line.get("reason") for line in lines(capsys)] == [None, "key_limit", "draining"]


async def test_the_servers_faults_are_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    upstream = FakeUpstream()
    async with in_process(upstream, api_keys=KEYS) as served:
        await ask(served)
        await ask(served, temperature=9)
        served.gateway.drain.begin()
        await served.http.get("/health/ready")
        await ask(served)
    (line,) = lines(capsys)
    assert (line["level"], line["status"]) == ("WARNING", 503)


async def test_the_peers_address_whatever_a_header_says(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with on_socket(FakeUpstream()) as served:
        headers = {"x-forwarded-for": "192.0.2.7", "forwarded": "for=192.0.2.7", "x-real-ip": "192.0.2.7"}
        await served.http.get("/v1/models", headers=headers)
    (line,) = lines(capsys)
    assert line["client"] == "127.0.0.1"


async def test_the_reasons_of_several_choices(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(say_choices), api_keys=KEYS) as served:
        await ask(served, n=3)
    (line,) = lines(capsys)
    assert line["finish_reason"] == "stop,length"


@pytest.mark.parametrize("form", ["json", "text"])
async def test_neither_prompts_nor_answers_nor_keys_show(
    capsys: pytest.CaptureFixture[str], form: str
) -> None:
    configure_logging("debug", form)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    upstream = FakeUpstream(lambda _: say("an", "swered"))
    async with in_process(upstream, api_keys=KEYS) as served:
        for stream in (False, True):
            await ask(served, stream=stream)
        await ask(served, temperature=99)
        await ask(served, messages=PROMPT)
        await ask(served, model=PROMPT)
        wrong = {"authorization": f"Bearer {SECRET}-guess"}
        await served.http.post(CHAT, json={"model": "glm", "messages": MESSAGES}, headers=wrong)
        await served.http.post(CHAT, content=PROMPT, headers=HEADERS | {"content-type": "application/json"})
    written = capsys.readouterr().err
    assert written.count("gateway.access") == 7
    assert not [text for text in (PROMPT, "harbour", "swered", SECRET) if text in written]


async def test_bodies_show_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=KEYS, log_prompts=True) as served:
        await ask(served)
        await ask(served, user="x" * BODY_LIMIT_BYTES)
        await served.http.get("/v1/models", headers=HEADERS)
    first, second, third = lines(capsys)
    assert json.loads(first["body"])["messages"][0]["content"] == PROMPT
    assert len(second["body"]) == BODY_LIMIT_BYTES
    assert "body" not in third
    assert SECRET not in json.dumps([first, second, third])


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 20, 80), (1.0, 200, 200)])
async def test_a_share_of_successes_and_every_failure(
    capsys: pytest.CaptureFixture[str], share: float, least: int, most: int
) -> None:
    configure_logging("info")
    async with in_process(FakeUpstream(), api_keys=KEYS, log_sample=share) as served:
        for _ in range(200):
            headers = HEADERS | {"x-request-id": "chosen"}  # decides nothing
            await served.http.get("/v1/models", headers=headers)
        for _ in range(5):
            await ask(served, temperature=99)
    written = lines(capsys)
    assert least <= sum(line["status"] == 200 for line in written) <= most
    assert sum(line["status"] == 400 for line in written) == 5


async def test_text_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    logging.getLogger("any").warning("careful", extra={"upstream": "triton:8001"})
    try:
        int("why")
    except ValueError:
        logging.getLogger("any").exception("it failed")
    first, second, *traceback = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING any: careful upstream='triton:8001'")
    assert second.endswith("ERROR any: it failed")
    assert traceback[-1].startswith("ValueError: ")


async def test_plain_lines_tell_of_failures_alone(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "plain")
    async with in_process(FakeUpstream(), log_format="plain") as served:
        await ask(served)
        await ask(served, temperature=9)
        await ask(served, model="\x1b[2Jno")
        await served.http.get("/nowhere%1B at/all?key=s3cret")
        await served.http.post("/v1/models")
        await served.http.get("/" + "a" * 999)
        assert served.metric("requests_total", route="unknown", model="unknown", status="404") == 2
    first, second, third, fourth, fifth = capsys.readouterr().err.splitlines()
    assert first.startswith(f"400 POST {CHAT}: temperature: ")
    assert first.count("temperature") == 1
    assert second.startswith(f"404 POST {CHAT}: model: ")
    assert "no" in second
    assert "\x1b" not in second
    assert third.startswith("404 GET /nowhere%1B%20at/all: There is nothing at this path. ")
    assert "s3cret" not in third
    assert fifth.startswith("404 GET /aaa")
    assert ": There is nothing at this path. " in fifth
    assert fourth.startswith("405 POST ")
    assert PROMPT not in first + second
