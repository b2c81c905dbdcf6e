"""One answer: engine tokens in, response documents out."""

from collections.abc import Iterator

from triton_models.engine.sequence import FinishReason, TokenLogprobs, TokenOutput
from triton_models.serving.logprobs import PromptReport, wire_logprob
from triton_models.text.answer import AnswerDelta, AnswerStream
from triton_models.text.tokenizers import Tokenizer
from wire import meta as wire
from wire.sampling import Generation

_WIRE_REASONS: dict[FinishReason | None, wire.FinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


class Answer:
    """Turns the tokens of one choice into responses, each with all that has piled up since the last.

    A stop string ends the answer here, at the token that completed it. The engine may be a few tokens ahead
    by then; those are dropped, so counts and text do not depend on the speed of delivery.

    `take` and `next_delta` run for every token of every request and compete with the engine's thread for the
    interpreter lock: the engine waits for every microsecond spent here.
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        stream: AnswerStream,
        index: int,
        echo: str = "",
        *,
        prompt: PromptReport | None = None,
    ) -> None:
        """Begin choice `index` of `generation`, with `echo` before its text and `prompt` beside it."""
        self._generation = generation
        self._tokenizer = tokenizer
        self._stream = stream
        self._index = index
        self._wants_ids = generation.return_token_ids
        self._wants_logprobs = generation.logprobs is not None
        self._wants_no_tokens = generation.max_tokens == 0
        self._prompt = prompt
        self._stop_reason: int | str | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.error: str | None = None
        """The engine's message, if an error ended the answer."""
        self._text = echo
        self._tokens = 0
        self._begin_details()

    @property
    def complete(self) -> bool:
        """True when the answer has ended, and not with an error."""
        return self.finish in _WIRE_REASONS

    @property
    def sendable(self) -> bool:
        """True when something has piled up that a streaming client is to be sent."""
        return bool(self._text or self._segments or self.tells_prompt)

    @property
    def tells_prompt(self) -> bool:
        """True when log-probabilities of the prompt are to be sent, whether the answer is streamed or not."""
        return self._prompt is not None and self._prompt.waits

    def take(self, output: TokenOutput) -> None:
        """Add one engine output; outputs after the end are dropped."""
        if self.finish is not None:
            return
        reason, token_id = output.finish_reason, output.token_id
        if self._prompt is not None:
            self._prompt.take(output.prompt_logprobs)
        if self._wants_no_tokens and token_id is not None:
            reason, token_id = FinishReason.LENGTH, None  # the engine samples a token even then
        if token_id is not None:
            self.completion_tokens += 1
            self._tokens += 1
            if self._wants_ids:
                self._token_ids.append(token_id)
            if reason is FinishReason.STOP:
                # The stop token is counted and its id reported; its text is shown only on request.
                if token_id in self._generation.stop_token_ids:
                    self._stop_reason = token_id
                if self._stop_shows(token_id):
                    self._add_text(token_id, output.logprobs)
            else:
                self._add_text(token_id, output.logprobs)
        if reason is not None and self.finish is None:
            self.finish = reason
            self.error = output.error
            self._append(self._stream.finish())
        self.cached_tokens = output.cached_tokens

    def next_delta(self) -> tuple[str, int, wire.Meta | None]:
        """Return and clear what has piled up: text, number of tokens, and details if there are any."""
        text, tokens = self._text, self._tokens
        self._text, self._tokens = "", 0
        if not (self._segments or self._wants_ids or self._wants_logprobs or self.tells_prompt):
            return text, tokens, None
        meta = wire.Meta(
            token_ids=self._token_ids if self._wants_ids else None,
            logprobs=self._logprobs if self._wants_logprobs else None,
            prompt_logprobs=None if self._prompt is None else self._prompt.tell(),
            segments=self._segments or None,
        )
        self._begin_details()
        return text, tokens, meta

    def prompt_parts(self) -> Iterator[tuple[str, wire.Meta]]:
        """Yield responses until the rest of the prompt's log-probabilities fits into the next one."""
        while self._prompt is not None and self._prompt.overflows:
            yield "", wire.Meta(index=self._index, prompt_logprobs=self._prompt.tell())

    def next_response(
        self, usage: wire.Usage | None = None, delivered: wire.Delivered | None = None
    ) -> tuple[str, wire.Meta]:
        """Return and clear what has piled up as a response; a complete answer's last one has `finish_reason`.

        Args:
            usage: the whole request's usage; for its final response.
            delivered: what was sent over a delta channel; for the last response of such an answer.
        """
        text, tokens, details = self.next_delta()
        details = details or wire.Meta()
        return text, wire.Meta(
            index=self._index,
            tokens=tokens,
            token_ids=details.token_ids,
            logprobs=details.logprobs,
            prompt_logprobs=details.prompt_logprobs,
            segments=details.segments,
            finish_reason=_WIRE_REASONS.get(self.finish),
            stop_reason=self._stop_reason,
            usage=usage,
            delivered=delivered,
        )

    def _begin_details(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[wire.TokenLogprob] = []
        self._segments: list[wire.Segment] = []

    def _stop_shows(self, token_id: int) -> bool:
        asked = self._generation
        return asked.include_stop and (asked.show_special or bool(self._tokenizer.piece(token_id)))

    def _add_text(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._logprobs.append(wire_logprob(self._tokenizer, logprobs))
        delta = self._stream.push(token_id)
        self._append(delta)
        if delta.stopped is not None:
            self._stop_reason = delta.stopped
        if delta.stopped is not None or delta.ended:
            self.finish = FinishReason.STOP

    def _append(self, delta: AnswerDelta) -> None:
        if delta.segments:
            offset = len(self._text)
            self._segments += [wire.Segment(offset + at, role) for at, role in delta.segments]
        self._text += delta.text
