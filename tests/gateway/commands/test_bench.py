import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.bench import Measured, plot, table
from gateway.commands.load_rows import summarise
from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.errors import UnavailableError
from tests.gateway.commands.test_load_rows import answer
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import on_socket, until

TRITONGATE = Path(sys.executable).with_name("tritongate")


def counted(request: Generation) -> AsyncGenerator[Event, None]:
    return say(*["a"] * (request.max_tokens or 1), finish="length")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--clients", "0"),
        ("--clients", "1,x"),
        ("--prompt", ""),
        ("--out", "1.5"),
        ("--rate", "0"),
        ("--rate", "inf"),
        ("--seconds", "-1"),
        ("--spread", "-1"),
        ("--shared", "-1"),
    ],
)
def test_what_is_no_load_is_refused(flag: str, value: str) -> None:
    status, text = run("--model", "m", flag, value)
    assert status == 2
    assert f"Invalid value for '{flag}'" in text


async def test_each_pair_of_lengths_under_each_load(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    upstream = FakeUpstream(counted)
    async with on_socket(upstream) as served:
        grid = ["--prompt", "3,5", "--out", "2,4", "--clients", "1,2", "--rounds", "2", "--processes", "1"]
        status, text = await asyncio.to_thread(run, served.http.base_url, *grid, "--json", file)
    assert status == 0, text
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(row["clients"], row["requests"], row["output_tokens"]) for row in rows]
    assert found == [(1, 2, 2), (2, 4, 2), (1, 2, 4), (2, 4, 4)] * 2
    assert len(upstream.requests) == sum(row["requests"] for row in rows) + 4
    assert {len(request.prompt.messages[0].content.split()) for request in upstream.requests} == {3, 5}
    assert "row 8 of 8" in text
    assert text.count("█") > 8
    assert text.count("2 clients, 5 in, 4 out") == 2


async def test_an_open_loop_and_an_endpoint_that_is_told_less() -> None:
    upstream = FakeUpstream(counted)
    async with on_socket(upstream) as served:
        loop = ["--kind", "ids", "--prompt", "9", "--out", "3", "--rate", "20", "--seconds", "1"]
        status, text = await asyncio.to_thread(run, served.http.base_url, *loop, "--no-ignore-eos")
        refused = await asyncio.to_thread(run, served.http.base_url, "--model", "no", "--processes", "1")
    assert (status, "20/s" in text) == (0, True)
    assert not any(request.ignore_eos for request in upstream.requests)
    assert len({request.prompt for request in upstream.requests}) == len(upstream.requests)
    assert refused[0] == 1
    assert "status 404" in refused[1]
    assert run("--clients", "x")[0] == 2
    status, text = run("--model", "m", "--json", "/absent/rows")  # before anything is asked
    assert (status, "'/absent/rows': No such file" in text) == (2, True)


@pytest.mark.parametrize(("vocabulary", "below"), [(400, 400), (50, 50), (100_000, 60_000), (None, 60_000)])
async def test_ids_are_of_the_model_that_is_asked(vocabulary: int | None, below: int) -> None:
    upstream = FakeUpstream(counted)
    upstream.vocabulary = vocabulary
    async with on_socket(upstream) as served:
        loop = ["--kind", "ids", "--prompt", "500", "--out", "1", "--clients", "1", "--processes", "1"]
        status, text = await asyncio.to_thread(run, served.http.base_url, *loop)
    assert status == 0, text
    ids = {each for request in upstream.requests for each in request.prompt.ids}
    assert below * 0.9 < max(ids) < below
    assert len(ids) > 20


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_not_streamed_has_no_first_token(stream: bool) -> None:
    async with on_socket(FakeUpstream(counted)) as served:
        less = ["--clients", "1", "--rounds", "1", "--out", "3", "--processes", "1"]
        given = [served.http.base_url, *less, "--stream" if stream else "--no-stream"]
        status, text = await asyncio.to_thread(run, *given)
    assert status == 0, text
    assert [word in text for word in ("TTFT", "TPOT", "first token")] == [stream] * 3
    assert ("time to the whole answer" in text) is not stream


async def test_mixed_lengths_and_further_fields() -> None:
    upstream = FakeUpstream(counted)
    async with on_socket(upstream) as served:
        asked = ["--out", "4", "--clients", "4", "--rounds", "5", "--spread", "1", "--also", '{"top_p": 0.5}']
        status, text = await asyncio.to_thread(run, served.http.base_url, *asked)
    assert status == 0, text
    assert len({request.max_tokens for request in upstream.requests}) > 3
    assert {request.top_p for request in upstream.requests} == {0.5}
    assert "is not an object in JSON" in run("--also", "[1]")[1]
    assert "is not an object in JSON" in run("--also", "{")[1]
    assert "is not an object in JSON" in run("--also", "[" * 100_000)[1]


async def test_ctrl_c_shows_what_was_measured() -> None:
    hang = asyncio.Event()

    async def script(request: Generation) -> AsyncGenerator[Event, None]:
        if request.max_tokens == 3:
            await hang.wait()
        async for event in counted(request):
            yield event

    upstream = FakeUpstream(script)
    async with on_socket(upstream) as served:
        process = await asyncio.create_subprocess_exec(
            TRITONGATE, "bench", str(served.http.base_url), "--out", "2,3", "--clients", "1",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        await until(lambda: any(request.max_tokens == 3 for request in upstream.requests))
        process.send_signal(2)
        out, errors = await process.communicate()
    assert (process.returncode, b"Traceback" in errors) == (130, False), errors
    assert b"1 client, 64 in, 2 out" in out


async def test_a_load_that_fails_as_a_whole_shows_what_was_measured_before() -> None:
    def script(request: Generation) -> AsyncGenerator[Event, None]:
        if request.max_tokens == 3:
            raise UnavailableError("away", reason="not_ready")
        return counted(request)

    async with on_socket(FakeUpstream(script)) as served:
        grid = ["--out", "2,3", "--clients", "1", "--processes", "1"]
        status, text = await asyncio.to_thread(run, served.http.base_url, *grid)
    assert (status, "Error: all 1 requests failed, the first: status 503" in text) == (1, True), text
    assert "1 client, 64 in, 2 out" in text


def test_the_table_and_the_plot_are_aligned() -> None:
    measured = [
        Measured(5, 9, summarise([answer(0.0, 0.5, 1.0, tokens=2)], clients=clients, rate=0.0))
        for clients in (1, 100)
    ]
    assert len({len(line) for line in table(measured).splitlines()}) == 1
    assert len({line.index("█") for line in plot(measured).splitlines() if "client" in line}) == 1
