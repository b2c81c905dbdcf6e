import asyncio
import json
import threading
import tracemalloc
from typing import Any

import pytest

from gateway.errors import RateLimitError
from gateway.limits.bodies import Bodies, grown
from gateway.limits.counters import SharedCounters
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Body
from tests.gateway.places import places


def chat(*contents: str) -> dict[str, Any]:
    return {"model": "glm", "messages": [{"role": "user", "content": each} for each in contents]}


def ids(*prompts: list[int]) -> dict[str, Any]:
    return {"model": "glm", "prompt": list(prompts)}


TEXT = "It was a dark and stormy night; the rain fell in torrents. "
CODE = "def f(x):\n    return {\n        'a': x,\n    }\n"
LATEX = r"\frac{a}{b} + {c}"


@pytest.mark.parametrize(
    ("kind", "document", "most"),
    [
        (ChatRequest, chat(TEXT * 3000), 2),
        (ChatRequest, chat("你好世界" * 10_000), 4),
        (ChatRequest, chat(TEXT * 3000 + "你"), 2),
        (ChatRequest, chat(TEXT * 3000 + "😀"), 2),
        (ChatRequest, chat(*["hi"] * 999), 2),
        (ChatRequest, chat(CODE * 3000), 3),
        (ChatRequest, chat(LATEX * 3000), 3),
        (CompletionRequest, ids([*range(1000, 31_000)]), 2),
        (CompletionRequest, ids(*[[*range(1000, 2000)]] * 32), 2),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_a_body_becomes_is_known_before_it_is_read(
    kind: type[Body], document: dict[str, Any], most: int, ascii_only: bool
) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    small = {"model": "glm", "prompt": "x"} | (chat("x") if kind is ChatRequest else {})
    small.pop("prompt" if kind is ChatRequest else "messages", None)
    kind.read(json.dumps(small).encode())  # what is made once is there
    tracemalloc.start()
    request = kind.read(body)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert request.model == "glm"
    assert taken <= 1.05 * grown(body) + 10_000
    assert grown(body) <= most * taken + 2 * len(body)


def test_processes_count_bodies_together(table: int) -> None:
    one, other = (Bodies(100, SharedCounters(gauges=1, counters=0, place=place)) for place in places(table))
    one.hold(60)
    other.hold(40)
    with pytest.raises(RateLimitError, match="being sent at once"):
        one.hold(1)
    other.release(40)
    one.hold(40)
    assert (one.held, other.held) == (100, 0)


async def test_large_bodies_are_read_one_after_the_other_and_the_loop_goes_on() -> None:
    bodies = Bodies(10, SharedCounters(gauges=1, counters=0))
    go_on = threading.Event()
    began: list[threading.Thread] = []

    def read() -> str:
        began.append(threading.current_thread())
        assert go_on.wait(60)
        return "read"

    large = [asyncio.create_task(bodies.read(bytes(2**19), read)) for _ in range(3)]
    while not began:  # noqa: ASYNC110 - the thread has no event of this loop
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert len(began) == 1
    assert began[0] is not threading.main_thread()
    with pytest.raises(StopIteration):
        bodies.read(b"small", lambda: None).send(None)
    go_on.set()
    assert await asyncio.gather(*large) == ["read"] * 3
