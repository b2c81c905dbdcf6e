from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.core.events import (
    Accepted,
    CallPart,
    Delta,
    Event,
    Reasoning,
    TokenLogprob,
    Usage,
)
from gateway.errors import UpstreamProtocolError
from gateway.openai.answer import encode
from gateway.openai.chat_answer import ChatAnswer, ChatCompletionChunk, ChunkChoice, ChunkDelta
from gateway.openai.chat_request import ChatRequest
from gateway.openai.params import StreamOptions
from tests.gateway.openai.framing import chunks_of

AWKWARD = ["a", '"content":""', "\\", "\n\x00\x1f\x7f", "你好🙂", '"', "\u2028</script>"]
ASKED_WITH_IDS = b'{"model":"m","messages":[{"role":"user","content":"a"}],"return_token_ids":true}'
COUNTS = Usage(prompt_tokens=3, completion_tokens=9)


def writer(
    options: StreamOptions | None = None,
    model: str = "m",
    choices: int = 1,
    tools: Any = None,
    functions: Any = None,
) -> Any:
    asked = SimpleNamespace(
        model=model,
        logprobs=None,
        stream_options=options,
        n=choices,
        choices=choices,
        tools=tools,
        functions=functions,
        return_token_ids=None,
        return_tokens_as_token_ids=None,
        prompt_logprobs=None,
        include_reasoning=None,
    )
    return ChatAnswer(asked).accept(Accepted(prompt_tokens=3))


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("model", ["m", '"content":"", "'])
def test_a_chunk_of_text_alone_is_what_encoding_it_whole_gives(*, include_usage: bool, model: str) -> None:
    """Byte for byte: such chunks are cut from a template."""
    chunks = writer(StreamOptions(include_usage=include_usage) if include_usage else None, model, 2)
    chunks_of(chunks.write(Delta(pieces=("begun",), tokens=1)))
    for index in (0, 1):
        for text in AWKWARD:
            (chunk,) = chunks_of(chunks.write(Delta(pieces=(text,), tokens=1, index=index)))
            read = msgspec.json.decode(chunk, type=ChatCompletionChunk)
            assert read.choices == [ChunkChoice(index, ChunkDelta(content=text))]
            assert read.model == model
            assert ("usage" in msgspec.json.decode(chunk)) is include_usage
            assert encode(read) == chunk


def test_running_usage_counts_in_every_chunk() -> None:
    chunks = writer(StreamOptions(include_usage=True, continuous_usage_stats=True))
    usages = [
        msgspec.json.decode(chunk)["usage"]
        for _ in range(3)
        for chunk in chunks_of(chunks.write(Delta(pieces=("a",), tokens=2)))
    ]
    # With the role nothing was sent yet; how much the cache held is known at the end.
    assert [usage["completion_tokens"] for usage in usages] == [0, 2, 4, 6]
    assert [usage["total_tokens"] for usage in usages] == [3, 5, 7, 9]
    assert not any("prompt_tokens_details" in usage for usage in usages)


def test_the_choices_begin_in_order_and_the_stream_ends_when_all_have() -> None:
    """Whichever speaks first: the SDK takes them for the choices 0, 1, ... as they come."""
    chunks = writer(choices=2)
    written = [
        *chunks_of(chunks.write(Delta(pieces=("x",), tokens=1, index=1))),
        *chunks_of(chunks.write(Delta(pieces=("a",), tokens=1))),
        *chunks_of(chunks.write(Delta(tokens=1, finish_reason="stop"))),
        *chunks_of(chunks.write(Delta(pieces=("y",), tokens=1, index=1))),
    ]
    with pytest.raises(UpstreamProtocolError):
        chunks.close()
    written += chunks_of(chunks.write(Delta(tokens=1, index=1, finish_reason="length", usage=COUNTS)))
    assert chunks.close() == b"data: [DONE]\n\n"
    choices = [choice for chunk in written for choice in msgspec.json.decode(chunk)["choices"]]
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices] == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "x"}, None),
        (0, {"content": "a"}, None),
        (0, {}, "stop"),
        (1, {"content": "y"}, None),
        (1, {}, "length"),
    ]


def test_chunks_that_are_more_than_text_are_written_whole() -> None:
    chunks = writer()
    begun = chunks_of(chunks.write(Delta(pieces=("a",), tokens=1)))
    assert [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in begun] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    logprob = TokenLogprob(id=7, token="b", utf8=b"b", logprob=-1.0, top=())
    (with_logprobs,) = chunks_of(chunks.write(Delta(pieces=("b",), tokens=1, logprobs=(logprob,))))
    assert msgspec.json.decode(with_logprobs)["choices"][0]["logprobs"]["content"][0]["token"] == "b"
    last = chunks_of(chunks.write(Delta(pieces=("c",), tokens=1, finish_reason="stop", usage=COUNTS)))
    assert [msgspec.json.decode(chunk)["choices"][0]["finish_reason"] for chunk in last] == [None, "stop"]
    assert chunks_of(chunks.write(Delta(tokens=1))) == []


def test_token_ids_are_beside_the_text_that_they_are_of() -> None:
    chunks = ChatAnswer(ChatRequest.read(ASKED_WITH_IDS)).accept(
        Accepted(prompt_tokens=2, prompt_token_ids=((8, 9),))
    )
    written = [
        msgspec.json.decode(chunk)
        for delta in (
            Delta(pieces=("a",), tokens=1, token_ids=(5,)),
            Delta(pieces=("b",), tokens=2, token_ids=(6, 7)),
            Delta(tokens=1, token_ids=(2,), finish_reason="stop", usage=COUNTS),
        )
        for chunk in chunks_of(chunks.write(delta))
    ]
    assert [chunk.get("prompt_token_ids") for chunk in written] == [[8, 9], *[None] * (len(written) - 1)]
    choices = [chunk["choices"][0] for chunk in written]
    assert [(choice["delta"].get("content"), choice.get("token_ids")) for choice in choices] == [
        ("", None),
        ("a", [5]),
        ("b", [6, 7]),
        ("", [2]),
        (None, None),
    ]
    assert choices[-1]["finish_reason"] == "stop"


CALLS = (CallPart("get_weather", '{"city": "北京"}'), CallPart("now", "{}"))
TOOL_DELTAS = [
    Delta(pieces=("Let me ",), tokens=2),
    Delta(pieces=("see.", *CALLS[:1]), tokens=3),
    Delta(tokens=4),
    Delta(tokens=0, pieces=CALLS[1:], finish_reason="tool_calls", usage=COUNTS),
]


async def told(deltas: list[Delta]) -> AsyncIterator[Event]:
    for delta in deltas:
        yield delta


def asked_with(*, older: bool) -> Any:
    offered = {"tools": None if older else [1], "functions": [1] if older else None}
    return SimpleNamespace(
        model="m",
        logprobs=None,
        stream_options=None,
        n=1,
        choices=1,
        return_token_ids=None,
        return_tokens_as_token_ids=None,
        prompt_logprobs=None,
        include_reasoning=None,
        **offered,
    )


async def whole(deltas: list[Delta], *, older: bool = False) -> Any:
    document = (
        await ChatAnswer(asked_with(older=older)).accept(Accepted(prompt_tokens=3)).complete(told(deltas))
    )
    return msgspec.json.decode(encode(document))["choices"][0]


def streamed(deltas: list[Delta], *, older: bool = False) -> list[Any]:
    chunks = ChatAnswer(asked_with(older=older)).accept(Accepted(prompt_tokens=3))
    return [
        msgspec.json.decode(chunk)["choices"][0]
        for delta in deltas
        for chunk in chunks_of(chunks.write(delta))
    ]


async def test_calls_are_written_whole_and_in_chunks_alike() -> None:
    choice = await whole(TOOL_DELTAS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"name": call.name, "arguments": call.arguments} for call in CALLS
    ]
    assert len({call["id"] for call in calls}) == 2
    assert all(len(call["id"]) >= 9 and call["type"] == "function" for call in calls)

    parts = streamed(TOOL_DELTAS)
    assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    fragments = [each for part in parts for each in part["delta"].get("tool_calls", [])]
    joined: dict[int, dict[str, str]] = {}
    for fragment in fragments:
        call = joined.setdefault(fragment["index"], {"arguments": ""})
        for key in ("id", "type", "name"):
            value = (fragment | fragment["function"]).get(key)
            if value is not None:
                assert key not in call
                call[key] = value
        call["arguments"] += fragment["function"]["arguments"]
    assert [(call["name"], call["arguments"]) for call in joined.values()] == [
        (call.name, call.arguments) for call in CALLS
    ]
    assert list(joined) == [0, 1]


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    deltas = [Delta(tokens=9), TOOL_DELTAS[-1]]
    assert (await whole(deltas))["message"]["content"] is None
    assert {part["delta"].get("content") for part in streamed(deltas)} == {None}
    text = [Delta(tokens=1, finish_reason="stop", usage=COUNTS)]
    answer = (await whole(text))["message"]
    assert answer["content"] == ""
    assert "tool_calls" not in answer


async def test_the_older_form_has_one_call() -> None:
    deltas = [*TOOL_DELTAS[:3], Delta(tokens=0, finish_reason="tool_calls", usage=COUNTS)]
    choice = await whole(deltas, older=True)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "北京"}'}
    parts = streamed(deltas, older=True)
    calls = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert calls == [{"name": "get_weather", "arguments": ""}, {"arguments": '{"city": "北京"}'}]
    assert parts[-1]["finish_reason"] == "function_call"


def test_reasoning_has_chunks_of_its_own_under_both_names() -> None:
    chunks = writer()
    delta = Delta(pieces=(Reasoning("Hm."), "Two.", CallPart("f", "{}")), tokens=3)
    found = [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in chunks_of(chunks.write(delta))]
    assert found[1:3] == [{"reasoning_content": "Hm.", "reasoning": "Hm."}, {"content": "Two."}]
    assert "tool_calls" in found[3]


async def test_reasoning_is_left_out_where_it_is_not_wanted() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=2, reasoning_tokens=1)
    deltas = [
        Delta(pieces=(Reasoning("Hm."),), tokens=1),
        Delta(pieces=("Two.",), tokens=1, finish_reason="stop", usage=usage),
    ]
    asked = ChatRequest.read(
        b'{"model":"m","messages":[{"role":"user","content":"a"}],"include_reasoning":false}'
    )
    complete = encode(await ChatAnswer(asked).accept(Accepted(prompt_tokens=3)).complete(told(deltas)))
    assert msgspec.json.decode(complete)["choices"][0]["message"]["content"] == "Two."
    stream = ChatAnswer(asked).accept(Accepted(prompt_tokens=3))
    chunks = b"".join(stream.write(delta) for delta in deltas)
    assert b"Two." in chunks
    assert b"Hm." not in complete + chunks


async def test_reasoning_of_a_complete_answer() -> None:
    async def events() -> AsyncIterator[Event]:
        yield Delta(pieces=(Reasoning("H"),), tokens=1)
        usage = Usage(prompt_tokens=3, completion_tokens=2, reasoning_tokens=1)
        yield Delta(pieces=(Reasoning("m"),), tokens=1, finish_reason="length", usage=usage)

    asked = ChatRequest.read(b'{"model":"m","messages":[{"role":"user","content":"a"}]}')
    answer = msgspec.json.decode(
        encode(await ChatAnswer(asked).accept(Accepted(prompt_tokens=3)).complete(events()))
    )
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm", "Hm", "")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
