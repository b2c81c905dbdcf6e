"""One answer, streamed or not, as a load generator sees it: when its pieces arrived, and its token counts."""

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Document(msgspec.Struct):
    """The fields that are read of a chunk or of a complete answer, from either route."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Document).decode


@dataclass(slots=True)
class Answer:
    """The timing and token counts of one answer. Times are those of `time.monotonic`, in seconds."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    """Arrival time of each chunk that holds text or the end of the answer."""
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    """The reason why the request counts as failed; None: it does not."""

    def take_event(self, now: float, data: bytes) -> None:
        """Process the data of one event of a stream."""
        if data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error:
            self.error = str(chunk.error)
        for choice in chunk.choices:
            if choice.text or choice.delta.content or choice.finish_reason:
                self.pieces.append(now)
        if chunk.usage is not None:
            self._count(chunk.usage)

    def finish(self, body: bytes | None) -> None:
        """End the answer; `body` is that of an answer that was not streamed.

        Raises:
            ValueError: `body` is not an answer of an OpenAI server.
        """
        self.ended = monotonic()
        if body is not None:
            document = _decode(body)
            self.pieces.append(self.ended)
            if document.usage is not None:
                self._count(document.usage)
        if self.error is None and not (self.pieces and self.tokens):
            self.error = "no text, or no token counts"

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.tokens = usage.completion_tokens
