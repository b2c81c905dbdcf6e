"""One streamed or whole answer, as a load generator sees it: when its pieces came, and the counts it gave."""

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
    """What is read of a chunk or of a whole answer, of either route."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Document).decode


@dataclass(slots=True)
class Answer:
    """Instants are of `time.monotonic`, in seconds."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    """When each chunk came that shows something: text, or the end."""
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None
    """Why it counts as failed."""

    def take_event(self, now: float, data: bytes) -> None:
        """Take the data of one event of a stream."""
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

    def finish(self, whole: bytes | None) -> None:
        """End it; `whole` is an answer that was not streamed.

        Raises:
            ValueError: it is not what an OpenAI server answers.
        """
        self.ended = monotonic()
        if whole is not None:
            document = _decode(whole)
            self.pieces.append(self.ended)
            if document.usage is not None:
                self._count(document.usage)
        if self.error is None and not (self.pieces and self.tokens):
            self.error = "no text, or no token counts"

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.tokens = usage.completion_tokens
