import asyncio
import contextlib
import json
import os
import pty
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.commands.chat import Chat, Conversation
from gateway.commands.endpoint import ClientError
from gateway.core.events import Event
from gateway.core.request import Generation
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.serving import Served, on_socket, until

TRITONGATE = Path(sys.executable).with_name("tritongate")
CTRL_C, CTRL_D = "\x03", "\x04"


def run(*arguments: object, text: str | bytes = "") -> tuple[int, str]:
    result = CliRunner().invoke(main, ["chat", *map(str, arguments)], input=text)
    return result.exit_code, result.output


async def ask(served: Served, *arguments: object, text: str | bytes = "") -> tuple[int, str]:
    return await asyncio.to_thread(run, *arguments, "--url", served.http.base_url, text=text)


async def test_a_pipe_gets_the_answer_and_nothing_else() -> None:
    upstream = FakeUpstream()
    async with on_socket(upstream) as served:
        assert await ask(served, "-q", "hi", "--system", "Be.", "--temperature", "0") == (0, "Hello world\n")
        assert await ask(served, text="two\nlines\n") == (0, "Hello world\n")
    first, second = upstream.requests
    assert (first.model, first.temperature) == ("glm", 0)
    assert [(each.role, each.content) for each in first.prompt.messages] == [
        ("system", "Be."),
        ("user", "hi"),
    ]
    assert second.prompt.messages[0].content == "two\nlines"


async def test_errors_are_a_line_and_status_1() -> None:
    async with on_socket(FakeUpstream()) as served:
        status, text = await ask(served, "-q", "hi", "--model", "absent")
        assert status == 1
        assert text.startswith("Error: ")
        assert text.endswith("(404)\n")
        assert await ask(served, text=" \n") == (1, "Error: there is nothing to ask\n")
        status, text = await ask(served, text="你好".encode("gbk"))
        assert (status, text) == (1, "Error: what the pipe asks is not UTF-8 at byte 0\n")
    assert run("-q", "hi", "--url", "http://127.0.0.1:9")[0] == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": 1}', '{"model": "m", "messages": [{"role": "x"}]}']
)
def test_only_conversations_are_read(text: str) -> None:
    with pytest.raises(ClientError):
        Conversation.read(text)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_by_either_of_its_names(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def events(*_: object) -> Generator[dict[str, Any]]:
        for delta in ({name: "Hm."}, {"content": "Yes."}):
            yield {"choices": [{"delta": delta}]}

    monkeypatch.setattr("gateway.commands.chat.events", events)
    talk = Chat("http://endpoint", None, Conversation("m"))
    talk._plain = False
    talk.ask("hi")
    assert capsys.readouterr().out == "Hm.\n\nYes.\n"


class Terminal:
    """`tritongate chat` on a terminal of its own."""

    def __init__(self, controller: int) -> None:
        self.screen = ""
        self._controller = controller
        asyncio.get_running_loop().add_reader(controller, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self.screen += os.read(self._controller, 4096).decode(errors="replace")
            return
        asyncio.get_running_loop().remove_reader(self._controller)

    async def type(self, keys: str) -> None:
        """Type once there is a prompt."""
        await until(lambda: self.screen.removesuffix("\x1b[?2004h").endswith(("> ", "... ")))
        self.screen = ""
        os.write(self._controller, keys.encode())

    async def shows(self, text: str) -> None:
        await until(lambda: text in self.screen)

    def press(self, key: str) -> None:
        os.write(self._controller, key.encode())


@contextlib.asynccontextmanager
async def terminal(served: Served) -> AsyncIterator[Terminal]:
    controller, end = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        TRITONGATE, "chat", "--url", str(served.http.base_url),
        stdin=end, stdout=end, stderr=end, start_new_session=True, preexec_fn=lambda: _control(end),
        env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(end)
    try:
        yield Terminal(controller)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(controller)


def _control(end: int) -> None:
    """Have the terminal's Ctrl-C reach this process."""
    import fcntl  # noqa: PLC0415 - in the child
    import termios  # noqa: PLC0415

    fcntl.ioctl(end, termios.TIOCSCTTY, 0)


def said(request: Generation) -> list[str]:
    messages: Any = request.prompt
    return [each.content for each in messages.messages]


async def test_a_conversation(tmp_path: Path) -> None:
    upstream = FakeUpstream()
    file = tmp_path / "talk.json"
    async with on_socket(upstream) as served, terminal(served) as chat:
        await chat.type("hi\n")
        await chat.shows("3 tokens")
        await chat.type("/system Be.\n")
        await chat.type('"""one\n')
        await chat.type('two"""\n')
        await chat.shows("3 tokens")
        await chat.type("/temperature hot\n")
        await chat.shows("no temperature")
        await chat.type("/temperature 0.5\n")
        await chat.type("/model org/glm-2\n")
        await chat.type("/model nope\n")
        await chat.shows("no model nope")
        await chat.type("/retry\n")
        await chat.shows("3 tokens")
        await chat.type(f"/save {file}\n")
        await chat.type("/clear\n")
        await chat.type(f"/load {file}\n")
        await chat.shows("> one")
        await chat.type("a\\\n")
        await chat.type("b\n")
        await chat.shows("3 tokens")
        await chat.type("/what\n")
        await chat.shows("/retry")
        await chat.type(CTRL_D)
    first, second, third, fourth = upstream.requests
    assert said(first) == ["hi"]
    assert said(second) == said(third) == ["Be.", "hi", "Hello world", "one\ntwo"]
    assert (third.model, third.temperature) == ("org/glm-2", 0.5)
    assert said(fourth) == [*said(third), "Hello world", "a\nb"]
    assert len(json.loads(file.read_text())["messages"]) == 4


async def test_a_file_that_cannot_be_loaded_ends_no_conversation(tmp_path: Path) -> None:
    picture, deep = tmp_path / "picture.png", tmp_path / "deep.json"
    picture.write_bytes(b"\x89PNG")
    deep.write_text("[" * 100_000)
    upstream = FakeUpstream()
    async with on_socket(upstream) as served, terminal(served) as chat:
        await chat.type("hi\n")
        await chat.shows("3 tokens")
        for file in (picture, deep):
            await chat.type(f"/load {file}\n")
            await chat.shows("Error: this is no conversation")
        await chat.type("/load ~nobody-here/talk.json\n")
        await chat.shows("Error: ")
        await chat.type("on\n")
        await chat.shows("3 tokens")
        await chat.type("/quit\n")
    assert said(upstream.requests[1]) == ["hi", "Hello world", "on"]


async def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    async def forever(_: Generation) -> AsyncGenerator[Event, None]:
        async for event in say(*["word "] * 100_000, gap_s=0.01):
            yield event

    upstream = FakeUpstream(forever)
    async with on_socket(upstream) as served, terminal(served) as chat:
        await chat.type("hi\n")
        await chat.shows("word word")
        chat.press(CTRL_C)
        await chat.shows("[stopped]")
        await until(lambda: upstream.running == 0)
        upstream.script = lambda _: say("next")
        await chat.type("on\n")
        await chat.shows("next")
        await chat.type(CTRL_C)
        await chat.shows("Ctrl-D ends")
        await chat.type("/quit\n")
    assert [text for text in said(upstream.requests[1]) if not text.startswith("word ")] == ["hi", "on"]
