from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.generation import Accepted, Delta, TokenLogprob, Usage
from gateway.openai.answer import encode
from gateway.openai.chat_answer import ChatAnswer, ChatCompletionChunk, ChunkChoice, ChunkDelta
from gateway.openai.generation_request import StreamOptions

AWKWARD = ["a", '"content":""', "\\", "\n\x00\x1f\x7f", "你好🙂", '"', "\u2028</script>"]
COUNTS = Usage(prompt_tokens=3, completion_tokens=9)


def writer(options: StreamOptions | None = None, model: str = "m") -> Any:
    asked = SimpleNamespace(model=model, logprobs=None, stream_options=options)
    return ChatAnswer(asked).chunks(Accepted(prompt_tokens=3))


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("model", ["m", '"content":"", "'])
def test_a_chunk_of_text_alone_is_what_encoding_it_whole_gives(*, include_usage: bool, model: str) -> None:
    """Byte for byte: such chunks are cut from a template."""
    chunks = writer(StreamOptions(include_usage=include_usage) if include_usage else None, model)
    chunks.write(Delta(text="begun", tokens=1))
    for index in (0, 1):
        for text in AWKWARD:
            (chunk,) = chunks.write(Delta(text=text, tokens=1, index=index))
            read = msgspec.json.decode(chunk, type=ChatCompletionChunk)
            assert read.choices == [ChunkChoice(index, ChunkDelta(content=text))]
            assert read.model == model
            assert ("usage" in msgspec.json.decode(chunk)) is include_usage
            assert encode(read) == chunk


def test_running_usage_counts_in_every_chunk() -> None:
    chunks = writer(StreamOptions(include_usage=True, continuous_usage_stats=True))
    counts = []
    for _ in range(3):
        chunk = chunks.write(Delta(text="a", tokens=2))[-1]
        counts.append(msgspec.json.decode(chunk)["usage"]["completion_tokens"])
    assert counts == [2, 4, 6]


def test_chunks_that_are_more_than_text_are_written_whole() -> None:
    chunks = writer()
    begun = chunks.write(Delta(text="a", tokens=1))
    assert [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in begun] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    logprob = TokenLogprob(token="b", utf8=b"b", logprob=-1.0, top=())
    (with_logprobs,) = chunks.write(Delta(text="b", tokens=1, logprobs=(logprob,)))
    assert msgspec.json.decode(with_logprobs)["choices"][0]["logprobs"]["content"][0]["token"] == "b"
    last = chunks.write(Delta(text="c", tokens=1, finish_reason="stop", usage=COUNTS))
    assert [msgspec.json.decode(chunk)["choices"][0]["finish_reason"] for chunk in last] == [None, "stop"]
    assert chunks.write(Delta(text="", tokens=1)) == []
