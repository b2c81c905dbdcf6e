import json

import msgspec
import pytest
from msgspec import UNSET, Struct

from gateway.core.events import (
    Accepted,
    Delta,
    Heartbeat,
    PromptLogprob,
    TopLogprob,
    Usage,
)
from gateway.errors import DeadlineError, UpstreamProtocolError
from gateway.openai.answer import ChunksAnswer, Document, encode, prompt_logprobs_document
from gateway.openai.answer import Usage as UsageDocument
from gateway.openai.completions import CompletionRequest
from gateway.openai.params import StreamOptions

LAST = Delta(pieces=("b",), tokens=1, finish_reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2))


class Chunk(Document, frozen=True, kw_only=True):
    """A word, or the total."""

    object: str = "chunk"
    choices: list[Struct]
    usage: UsageDocument | None


class Words(ChunksAnswer):
    """One chunk for each delta with text, and the total."""

    kind, chunk = "words", Chunk

    async def complete(self, events: object) -> Struct:
        raise NotImplementedError

    def _delta(self, delta: Delta, usage: object) -> list[bytes]:
        return [b'"%b"' % delta.text.encode()] if delta.text else []


def stream() -> Words:
    request = CompletionRequest(
        model="m", prompt="", stream=True, stream_options=StreamOptions(include_usage=True)
    )
    return Words(request).accept(Accepted(prompt_tokens=1))


def test_chunks_are_framed_and_the_stream_ends_with_its_mark() -> None:
    events = stream()
    assert events.begin() == b""
    assert events.write(Heartbeat()) == b""
    assert events.write(Delta(tokens=1)) == b""
    assert events.write(LAST) == b'data: "b"\n\n'
    total, end, rest = events.close().split(b"\n\n")
    assert msgspec.json.decode(total.removeprefix(b"data: "), type=Chunk).usage.total_tokens == 3
    assert (end, rest) == (b"data: [DONE]", b"")


def test_an_error_is_a_chunk_before_the_mark() -> None:
    events = stream()
    with pytest.raises(UpstreamProtocolError):
        events.close()
    error, end, rest = events.fail(DeadlineError("too late")).split(b"\n\n")
    assert error.startswith(b'data: {"error":{"message":"too late"')
    assert (end, rest) == (b"data: [DONE]", b"")


LIKELY = tuple(
    TopLogprob(id=id_, token=token, utf8=token.encode(), logprob=logprob)
    for id_, token, logprob in ((7, "b", -0.25), (5, "a", -1.5), (9, "c", -2.5))
)
FIRST = PromptLogprob(id=3, token="sop", utf8=b"", logprob=None, top=())
AMONG = PromptLogprob(id=5, token="a", utf8=b"a", logprob=-1.5, top=LIKELY, rank=2)
BELOW = PromptLogprob(id=8, token="你", utf8="你".encode(), logprob=-9999.0, top=LIKELY, rank=900)


def entry(logprob: float, rank: int, token: str) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


def test_each_token_is_told_with_what_was_likelier() -> None:
    document = json.loads(encode(prompt_logprobs_document([FIRST, AMONG, BELOW], 2)))
    likely = {"7": entry(-0.25, 1, "b"), "5": entry(-1.5, 2, "a")}
    assert document == [None, likely, {"8": entry(-9999.0, 900, "你"), **likely}]
    assert [list(each or ()) for each in document] == [[], ["5", "7"], ["8", "7", "5"]], "its own comes first"


def test_no_alternatives_leave_the_token_itself() -> None:
    document = json.loads(encode(prompt_logprobs_document([FIRST, AMONG], 0)))
    assert document == [None, {"5": entry(-1.5, 2, "a")}]


def test_it_is_there_only_where_it_was_asked_for() -> None:
    assert prompt_logprobs_document([FIRST, AMONG], None) is UNSET
    assert prompt_logprobs_document([FIRST], 20) == [None]
