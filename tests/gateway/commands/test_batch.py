import asyncio
import fcntl
import io
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands import batch
from gateway.commands.progress import Progress
from gateway.core.events import Event
from gateway.core.request import Generation
from gateway.errors import UnavailableError
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import Served, on_socket, until

TRITONGATE = Path(sys.executable).with_name("tritongate")
CHAT = "/v1/chat/completions"


def line(name: str, content: str = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "glm", "messages": messages, **body},
    }


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["batch", *map(str, arguments)])
    return result.exit_code, result.output


async def ask(served: Served, *arguments: object) -> tuple[int, str]:
    return await asyncio.to_thread(run, *arguments, "--url", served.http.base_url)


def asked(upstream: FakeUpstream) -> list[str]:
    return sorted(request.prompt.messages[-1].content for request in upstream.requests)


async def test_each_line_has_its_answer_or_its_error(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"), line("b", temperature=9), line("c", model="absent"))
    async with on_socket(FakeUpstream()) as served:
        status, text = await ask(served, source, tmp_path / "out", "--at-once", 2)
    assert (status, text.splitlines()[-1].partition(",")[0]) == (1, "3 of 3 done")
    assert "2 failed" in text
    assert text.count(" failed: 40") == 1  # the first one's reason, for who asks a thousand with a wrong key
    found = read(tmp_path / "out")
    assert found["a"]["error"] is None
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert found["a"]["response"]["request_id"]
    assert (found["b"]["response"]["status_code"], found["c"]["response"]["status_code"]) == (400, 404)
    assert found["b"]["response"]["body"]["error"]["param"] == "temperature"


async def test_half_of_a_surrogate_pair_costs_its_own_line_at_most(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", line("\ud800"), line("b", "\ud800"), line("c")), tmp_path / "out"
    async with on_socket(FakeUpstream()) as served:
        assert (await ask(served, source, out))[0] == 1
        assert "3 of 3 done, 1 failed" in (await ask(served, source, out))[1]
    found = {name: each["response"]["status_code"] for name, each in read(out).items()}
    assert found == {"\ud800": 200, "b": 400, "c": 200}


async def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", *(line(name, name) for name in "abc")), tmp_path / "out"
    upstream = FakeUpstream()
    async with on_socket(upstream) as served:
        assert (await ask(served, write(tmp_path / "first", line("a", "a")), out))[0] == 0
        out.write_text(out.read_text() + '{"custom_id": "b", "respo')  # where a crash cut it off
        assert (await ask(served, source, out))[0] == 0
        assert asked(upstream) == ["a", "b", "c"]
        assert (await ask(served, source, out))[0] == 0
    assert asked(upstream) == ["a", "b", "c"]
    assert read(out).keys() == {"a", "b", "c"}


async def test_what_failed_is_asked_again_only_on_demand(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", line("a", "a"), line("b", "b", temperature=9)), tmp_path / "out"
    upstream = FakeUpstream()
    async with on_socket(upstream) as served:
        assert (await ask(served, source, out))[0] == 1
        write(source, line("a", "a"), line("b", "b"))
        status, text = await ask(served, source, out)
        assert (status, "--retry-failed" in text) == (1, True), text
        assert (await ask(served, source, out, "--retry-failed"))[0] == 0
    assert asked(upstream) == ["a", "b"]
    assert {each["response"]["status_code"] for each in read(out).values()} == {200}


async def test_what_passes_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.commands.batch._LONGEST_PAUSE_S", 0.01)
    answers = iter([True, True, False])

    def script(_: Generation) -> AsyncGenerator[Event, None]:
        if next(answers):
            raise UnavailableError("loading")
        return say("yes")

    async with on_socket(FakeUpstream(script)) as served:
        assert (await ask(served, write(tmp_path / "in", line("a")), tmp_path / "out"))[0] == 0
    (only,) = read(tmp_path / "out").values()
    assert only["response"]["body"]["choices"][0]["message"]["content"] == "yes"


def test_an_endpoint_that_is_away_fails_each_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"), line("b"))
    status, _ = run(source, tmp_path / "out", "--url", "http://127.0.0.1:9", "--attempts", 1)
    assert status == 1
    found = read(tmp_path / "out")
    assert found.keys() == {"a", "b"}
    assert found["a"]["response"] is None
    assert "cannot reach" in found["a"]["error"]["message"]


@pytest.mark.parametrize("fails", [True, False], ids=["away", "was full"])
async def test_why_it_waits_is_told_until_that_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("gateway.commands.batch._LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr("gateway.commands.progress.Progress.show", lambda _, text: shown.append(text))
    answers = iter([True, False])

    def script(_: Generation) -> AsyncGenerator[Event, None]:
        if next(answers):
            raise UnavailableError("loading")
        return say("yes")

    source = write(tmp_path / "in", line("a"))
    if fails:
        run(source, tmp_path / "out", "--url", "http://127.0.0.1:9", "--attempts", 2)
    else:
        async with on_socket(FakeUpstream(script)) as served:
            await ask(served, source, tmp_path / "out")
    why = "; cannot reach http://127.0.0.1:9: [Errno 111] Connection refused" if fails else "; 503: loading"
    assert any(text.startswith("0 of 1 done") and text.endswith(why) for text in shown), shown
    assert shown[-1].startswith("1 of 1 done")
    assert shown[-1].endswith(why) is fails


def test_wrong_input_is_named_before_anything_is_asked(tmp_path: Path) -> None:
    source = write(tmp_path / "in", line("a"), line("a"), line("b", stream=True))
    more = ["", "{", "[]", json.dumps(line("c") | {"url": "/x"}), "[" * 100_000]
    more += [json.dumps(line("d") | {"url": "/v1/completions "}), ""]
    source.write_text(source.read_text() + "\n".join(more))
    status, text = run(source, tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert f"{source}:2: custom_id 'a' is that of line 1" in text
    assert f"{source}:3: body.stream" in text
    assert f"{source}:5: " in text
    assert f"{source}:6: not a JSON object" in text
    assert f"{source}:7: url" in text
    assert f"{source}:8: nested too deeply" in text
    assert f"{source}:9: url" in text
    assert not (tmp_path / "out").exists()


def test_wrong_output_is_left_alone(tmp_path: Path) -> None:
    source, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    out.write_text("notes\n")
    status, text = run(source, out, "--url", "http://127.0.0.1:9")
    assert (status, out.read_text()) == (1, "notes\n")
    assert "name another file" in text
    write(out, {"custom_id": "z", "response": None, "error": {}})
    assert "another input, such as 'z'" in run(source, out, "--url", "http://127.0.0.1:9")[1]
    with out.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another run" in run(source, out, "--url", "http://127.0.0.1:9")[1]
    absent = tmp_path / "absent" / "out"
    assert f"cannot write {absent}: No such file" in run(source, absent, "--url", "http://127.0.0.1:9")[1]


def test_a_pipe_is_no_output(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    status, text = run(write(tmp_path / "in", line("a")), f"/dev/fd/{writer}")
    os.close(reader)
    os.close(writer)
    assert (status, "not seekable" in text) == (1, True), text


async def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    monkeypatch.setattr(batch, "open_output", lambda *_, **__: (open("/dev/full", "wb"), set(), 0))  # noqa: PTH123, SIM115
    async with on_socket(FakeUpstream()) as served:
        status, output = await ask(served, source, target)
    assert status == 1
    assert output.splitlines()[-1] == f"Error: cannot write {target}: No space left on device"
    assert "Traceback" not in output


async def test_a_line_that_was_not_asked_for_is_no_success(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(("\n" * 100_000).join(json.dumps(line(name)) for name in "abc"))

    def script(_: Generation) -> AsyncGenerator[Event, None]:
        os.truncate(source, 50_000)
        return say("yes")

    async with on_socket(FakeUpstream(script)) as served:
        status, text = await ask(served, source, out, "--at-once", "1")
    assert (status, "1 of 3 done, 0 failed" in text) == (1, True), text


class Interrupted(io.BytesIO):
    """A file that is being written as Ctrl-C comes."""

    def write(self, data: Any, /) -> int:
        signal.raise_signal(signal.SIGINT)
        return super().write(data)


class Answered(batch.Batch):
    """Has had answers to all that was asked."""

    def __init__(self, names: str) -> None:
        super().__init__("http://nobody", None, iter(()), at_once=1, attempts=1)
        self.left = [batch._output(batch.Line(name, CHAT, {}), {"status_code": 200}, None) for name in names]

    @property
    def running(self) -> bool:
        return bool(self.left)

    def result(self) -> dict[str, Any]:
        return self.left.pop(0)


def test_an_answer_that_ctrl_c_meets_is_written() -> None:
    out, counts = Interrupted(), batch._Counts(total=3, done=0, failed=0)
    with Progress() as progress:
        stopped = batch.run(Answered("abc"), out, counts, progress)
    written = [json.loads(each)["custom_id"] for each in out.getvalue().splitlines()]
    assert (stopped, written) == (True, ["a", "b"])  # the second Ctrl-C drops the rest


async def test_ctrl_c_lets_finish_what_was_asked(tmp_path: Path) -> None:
    names = [str(number) for number in range(9)]
    source, out = write(tmp_path / "in", *(line(name, name) for name in names)), tmp_path / "out"
    gate = asyncio.Event()
    upstream = FakeUpstream()

    async def script(_: Generation) -> AsyncGenerator[Event, None]:
        await gate.wait()
        async for event in say("yes"):
            yield event

    upstream.script = script
    async with on_socket(upstream) as served:
        process = await asyncio.create_subprocess_exec(
            TRITONGATE, "batch", source, out, "--url", str(served.http.base_url), "--at-once", "2",
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        await until(lambda: upstream.running == 2)
        process.send_signal(2)
        while b"stopping" not in await process.stderr.readline():
            pass
        gate.set()
        text = (await process.communicate())[1].decode()
        assert process.returncode == 130, text
        assert "Traceback" not in text
        assert len(read(out)) == len(asked(upstream)) == 2
        assert (await ask(served, source, out))[0] == 0
    assert asked(upstream) == names
