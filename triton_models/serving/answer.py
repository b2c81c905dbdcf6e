"""One answer on its way out: engine tokens in, response documents out."""

from dataclasses import dataclass, field

from triton_models.engine.sequence import FinishReason, TokenLogprobs, TokenOutput
from triton_models.text.answer import AnswerDelta, AnswerStream
from triton_models.text.tokenizer import Tokenizer
from wire import meta as wire
from wire.sampling import Generation

LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold."""

_WIRE_REASONS: dict[FinishReason | None, wire.FinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class _Pending:
    """What was sampled since the last response."""

    text: str = ""
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[wire.TokenLogprob] = field(default_factory=list)
    segments: list[wire.Segment] = field(default_factory=list)


class Answer:
    """Collects one request's tokens into the next response.

    A stop string ends the answer here, at the token that completed it: the engine may be a few tokens ahead
    by then, and those are dropped, so that counts and text do not depend on how fast anything was delivered.
    """

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, stream: AnswerStream, prompt_tokens: int
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._stream = stream
        self._prompt_tokens = prompt_tokens
        self._pending = _Pending()
        self._stop_reason: int | str | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None

    @property
    def complete(self) -> bool:
        """True when the answer ended as an answer, not by an error."""
        return self.finish in _WIRE_REASONS

    @property
    def sendable(self) -> bool:
        """True when there is something that a streaming client would see."""
        return bool(self._pending.text or self._pending.segments)

    def take(self, output: TokenOutput) -> None:
        """Add one engine output; outputs after the end are dropped."""
        if self.finish is not None:
            return
        self.cached_tokens = output.cached_tokens
        if output.token_id is not None:
            self._count(output.token_id)
            if output.finish_reason is FinishReason.STOP:
                # The token that stops is counted and reported by id; it is no text.
                if output.token_id in self._generation.stop_token_ids:
                    self._stop_reason = output.token_id
            else:
                self._add_text(output.token_id, output.logprobs)
        if self.finish is None and output.finish_reason is not None:
            self.finish = output.finish_reason
            self._append(self._stream.finish())

    def next_response(self) -> tuple[str, wire.Meta]:
        """Return what piled up and begin anew; a complete answer's last has `finish_reason` and `usage`."""
        pending, self._pending = self._pending, _Pending()
        return pending.text, wire.Meta(
            tokens=pending.tokens,
            token_ids=pending.token_ids if self._generation.return_token_ids else None,
            logprobs=pending.logprobs if self._generation.logprobs is not None else None,
            segments=pending.segments or None,
            finish_reason=_WIRE_REASONS.get(self.finish),
            stop_reason=self._stop_reason,
            usage=self._usage() if self.complete else None,
        )

    def _usage(self) -> wire.Usage:
        return wire.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )

    def _count(self, token_id: int) -> None:
        self.completion_tokens += 1
        self._pending.tokens += 1
        self._pending.token_ids.append(token_id)

    def _add_text(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._pending.logprobs.append(self._wire_logprob(logprobs))
        delta = self._stream.push(token_id)
        self._append(delta)
        if delta.stopped is not None:
            self._stop_reason = delta.stopped
            self.finish = FinishReason.STOP

    def _append(self, delta: AnswerDelta) -> None:
        offset = len(self._pending.text)
        self._pending.segments += [wire.Segment(offset + at, role) for at, role in delta.segments]
        self._pending.text += delta.text

    def _wire_logprob(self, logprobs: TokenLogprobs) -> wire.TokenLogprob:
        token, utf8 = self._tokenizer.display(logprobs.id)
        return wire.TokenLogprob(
            id=logprobs.id,
            token=token,
            bytes=list(utf8),
            logprob=max(logprobs.logprob, LOGPROB_FLOOR),
            top=[self._wire_top(token_id, logprob) for token_id, logprob in logprobs.top],
        )

    def _wire_top(self, token_id: int, logprob: float) -> wire.TopLogprob:
        token, utf8 = self._tokenizer.display(token_id)
        return wire.TopLogprob(
            id=token_id, token=token, bytes=list(utf8), logprob=max(logprob, LOGPROB_FLOOR)
        )
