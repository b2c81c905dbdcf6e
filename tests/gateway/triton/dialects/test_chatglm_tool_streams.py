"""Whatever a ChatGLM3 writes, and however it is cut: the joined stream is the whole answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core.events import Accepted, Event
from gateway.openai.answer import encode
from gateway.openai.chat_answer import ChatAnswer
from gateway.openai.chat_request import ChatRequest
from tests.gateway.openai.framing import chunks_of
from tests.gateway.triton.dialects.test_chatglm import END, response
from tests.gateway.triton.dialects.test_chatglm_tools import CALL, TOOLS, USER, read

PIECES = st.sampled_from(
    [CALL, "\n Hello. ", "get_weather", "\n", " ", "```python\ntool_call(", "a='x'", ")\n```"]
)
ANSWERS = st.lists(st.lists(PIECES, max_size=4).map("".join), min_size=1, max_size=4)


def responses_of(segments: list[str], cuts: list[int], finish: str) -> list[Any]:
    """Return an answer of `segments` cut into deltas at `cuts`; without cuts it is one response."""
    whole = "".join(segments)
    starts = [sum(map(len, segments[:number])) for number in range(1, len(segments))]
    bounds = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    built: list[Any] = []
    for begin, end in pairwise(bounds):
        last = len(built) == len(bounds) - 2
        here = [at for at in starts if at < end or last]
        starts = [at for at in starts if at not in here]
        meta: dict[str, Any] = {"tokens": 1}
        if here:
            meta["segments"] = [{"at": at - begin, "role": "assistant"} for at in here]
        if last:
            meta |= {"finish_reason": finish, "usage": END["usage"]}
        built.append(response(whole[begin:end], meta))
    return built


async def as_events(events: list[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


@given(ANSWERS, st.lists(st.integers(0, 500), max_size=6), st.sampled_from(["stop", "length"]), st.booleans())
def test_the_joined_stream_is_the_whole_answer(
    segments: list[str],
    cuts: list[int],
    finish: str,
    older: bool,
) -> None:
    """However the deltas were cut: text, calls and the reason of the end."""
    # Where there can be one call, the model's side ends the answer after it.
    assume(not older or "".join(segments).count(")\n```") <= 1)
    offered = {"tools": None, "functions": [each["function"] for each in TOOLS]} if older else {}
    body = {"model": "m", "messages": [USER], "tools": TOOLS, **offered}
    request = ChatRequest.read(json.dumps(body).encode())
    accepted = Accepted(prompt_tokens=7)
    events = read(*responses_of(segments, [], finish), **offered)
    document = asyncio.run(ChatAnswer(request).accept(accepted).complete(as_events(events)))
    choice = json.loads(encode(document))["choices"][0]
    message = choice["message"]

    writer = ChatAnswer(request).accept(accepted)
    content, reason = None, None
    calls: dict[int, dict[str, str]] = {}
    for event in read(*responses_of(segments, cuts, finish), **offered):
        for chunk in chunks_of(writer.write(event)):
            part = json.loads(chunk)["choices"][0]
            reason = part["finish_reason"] or reason
            delta = part["delta"]
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            pieces = delta.get("tool_calls", [])
            if "function_call" in delta:
                pieces = [{"index": 0, "function": delta["function_call"]}]
            for piece in pieces:
                call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                for key, value in piece["function"].items():
                    call[key] += value
    whole_calls = [call["function"] for call in message.get("tool_calls", [])]
    if "function_call" in message:
        whole_calls = [message["function_call"]]
    assert reason == choice["finish_reason"]
    assert (content or "") == (message["content"] or "")
    assert list(calls.values()) == whole_calls
