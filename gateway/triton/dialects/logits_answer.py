"""Reads the logits of a prompt in our own contract: parts in order, then an end without an answer."""

from collections.abc import Sequence
from typing import Final

from gateway.core.events import Accepted, Delta, Event, Heartbeat, LogitsPart, Usage
from gateway.triton.dialects.base import Response
from gateway.triton.dialects.chatglm_answer import not_understood, read_accepted, read_content
from wire.meta import Meta

_HEARTBEAT: Final = Meta()
_FLOAT_BYTES: Final = 4


class LogitsAnswer:
    """An `AnswerDecoder`: yields `Accepted`, a delta for each part, and one with the usage."""

    over = False

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._told = 0
        """How many tokens' logits have come."""
        self._ended = False

    def decode(self, response: Response) -> list[Event]:
        """See `AnswerDecoder.decode`."""
        content, meta = read_content(response)
        if not content and meta == _HEARTBEAT:
            return [] if self._accepted is None else [Heartbeat()]
        if self._accepted is None:
            self._accepted = read_accepted(content, meta)
            return [self._accepted]
        if self._ended:
            raise not_understood("a response after the final one")
        if meta.logits is not None:
            return [self._part(content, meta)]
        return [self._end(content, meta, self._accepted)]

    def end(self) -> Sequence[Event]:
        """See `AnswerDecoder.end`."""
        if not self._ended:
            raise not_understood("it ended without its final response")
        return ()

    def _part(self, content: bytes, meta: Meta) -> Delta:
        logits = meta.logits
        if logits is None or meta != Meta(logits=logits):
            raise not_understood("something beside logits")
        size = logits.vocabulary * _FLOAT_BYTES
        if logits.first != self._told or size <= 0 or not content or len(content) % size:
            raise not_understood("logits out of order, or of part of a token")
        self._told += len(content) // size
        return Delta(tokens=0, logits=LogitsPart(logits.first, logits.vocabulary, content))

    def _end(self, content: bytes, meta: Meta, accepted: Accepted) -> Delta:
        usage = meta.usage
        if content or meta.finish_reason is None or usage is None or meta.index:
            raise not_understood("neither logits nor their end")
        if self._told != accepted.prompt_tokens:
            raise not_understood(f"logits of {self._told} of {accepted.prompt_tokens} tokens")
        self._ended = True
        told = Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            queue_s=meta.queue_s,
        )
        return Delta(tokens=0, finish_reason=meta.finish_reason, usage=told)
