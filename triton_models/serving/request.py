"""One generation between its arrival and its final response: engine tokens in, response documents out."""

import enum
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from triton_models.engine.sequence import FinishReason, TokenLogprobs, TokenOutput
from triton_models.serving.outbox import Call, Responder
from triton_models.text.answer import AnswerDelta, AnswerStream
from triton_models.text.tokenizers import Tokenizer, shown_tokens
from wire import meta as wire
from wire.refusal import RefusalCode
from wire.request import Generation

if TYPE_CHECKING:
    from triton_models.serving.channel import DeltaChannel

LOGPROB_FLOOR: Final = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold."""

RESPONSE_TOKENS: Final = 256
"""Most tokens of a prompt reported in one response, however many a step computed: with their alternatives, at
most half a megabyte, which takes a few milliseconds to read."""

_WIRE_REASONS: Final[dict[FinishReason | None, wire.FinishReason]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

_REFUSALS: Final[dict[FinishReason, tuple[RefusalCode, str]]] = {
    FinishReason.CANCELLED: (RefusalCode.CANCELLED, "the request was cancelled"),
    FinishReason.DEADLINE: (RefusalCode.DEADLINE_EXCEEDED, "the request's time is over"),
    FinishReason.SHUTDOWN: (RefusalCode.SHUTTING_DOWN, "the model is being unloaded"),
    FinishReason.ERROR: (RefusalCode.INTERNAL, "the engine failed on this request"),
    FinishReason.MASK: (
        RefusalCode.INVALID_GRAMMAR,
        "the answer could not be held to its grammar to its end",
    ),
}


class PromptReport:
    """The report on a prompt's tokens, made as the engine computes them. The first has no probability."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """Begin the report on `ids`, at least one, that `generation` wants, matching the prompt's echo."""
        self._tokenizer = tokenizer
        self._ranks = generation.prompt_ranks
        # Text is echoed as given, without the special tokens put before it.
        special = generation.show_special and generation.prompt_token_ids is not None
        self._shown = shown_tokens(tokenizer, ids, special=special)
        token, utf8 = next(self._shown)
        self._next = [wire.PromptLogprob(id=ids[0], token=token, bytes=list(utf8), logprob=None, top=[])]

    @classmethod
    def of(cls, generation: Generation, tokenizer: Tokenizer, ids: Sequence[int]) -> "PromptReport | None":
        """Return the report that `generation` wants; None if it wants none."""
        return None if generation.prompt_logprobs is None else cls(generation, tokenizer, ids)

    def take(self, logprobs: Sequence[TokenLogprobs]) -> Iterator[list[wire.PromptLogprob]]:
        """Add the engine's results for the next tokens; yield what was not reported yet, in parts."""
        for each in logprobs:
            token, utf8 = next(self._shown)
            self._next.append(
                wire.PromptLogprob(
                    id=each.id,
                    token=token,
                    bytes=list(utf8),
                    logprob=max(each.logprob, LOGPROB_FLOOR),
                    top=_top(self._tokenizer, each),
                    rank=each.rank if self._ranks else None,
                )
            )
        while self._next:
            part, self._next = self._next[:RESPONSE_TOKENS], self._next[RESPONSE_TOKENS:]
            yield part


class Choice:
    """One of the answers that a request is for; for the engine, a separate request.

    A stop string ends the answer here, at the token that completed it. The engine may be a few tokens ahead
    by then; those are dropped, so counts and text do not depend on the speed of delivery.

    `take` and `next_delta` run for every token of every request and compete with the engine's thread for the
    interpreter lock: the engine waits for every microsecond spent there. Until the choice has ended, only the
    thread of `Delivery` uses it, then only the sender's.

    Attributes:
        key: its id in the engine, unique in this process.
        index: its place among the request's choices.
        report: the report on the prompt, if the request wants one; belongs to the sender's thread.
        finish: why the answer ended; None while it has not.
        error: the engine's message, if an error ended the answer.
        first_token: seconds from its arrival in the engine to its first step, and to its first token.
        closed_at: when its last response was sent, in monotonic seconds.
        deltas: how many deltas went into the frames of a delta channel.
    """

    def __init__(
        self,
        key: str,
        index: int,
        generation: Generation,
        tokenizer: Tokenizer,
        stream: AnswerStream,
        *,
        echo: str = "",
        report: PromptReport | None = None,
    ) -> None:
        """Begin choice `index` of `generation`, with `echo` before its text."""
        self.key = key
        self.index = index
        self.report = report
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.first_token: tuple[float, float] | None = None
        self.closed_at: float | None = None
        self.deltas = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._generation = generation
        self._tokenizer = tokenizer
        self._stream = stream
        self._wants_ids = generation.return_token_ids
        self._wants_logprobs = generation.logprobs is not None
        self._wants_no_tokens = generation.max_tokens == 0
        self._stop_reason: int | str | None = None
        self._text = echo
        self._tokens = 0
        self._begin_details()

    @property
    def ended(self) -> bool:
        """Whether the answer has ended; at most its last response is still to be sent."""
        return self.finish is not None

    @property
    def complete(self) -> bool:
        """Whether the answer has ended, and not with an error."""
        return self.finish in _WIRE_REASONS

    @property
    def sendable(self) -> bool:
        """Whether something has piled up that a streaming client is to be sent."""
        return bool(self._text or self._segments)

    def take(self, output: TokenOutput) -> bool:
        """Add one engine output, unless the answer has ended.

        Returns:
            Whether there is something to send or the answer has ended with this output.
        """
        if self.finish is not None:
            return False
        reason, token_id = output.finish_reason, output.token_id
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
        return self.sendable or self.finish is not None

    def fail(self) -> None:
        """Give up the answer; its request then ends with an error."""
        self.finish = FinishReason.ERROR

    def next_delta(self) -> tuple[str, int, wire.Meta | None]:
        """Return and clear what has piled up: text, number of tokens, and details if there are any."""
        text, tokens = self._text, self._tokens
        self._text, self._tokens = "", 0
        if not (self._segments or self._wants_ids or self._wants_logprobs):
            return text, tokens, None
        meta = wire.Meta(
            token_ids=self._token_ids if self._wants_ids else None,
            logprobs=self._logprobs if self._wants_logprobs else None,
            segments=self._segments or None,
        )
        self._begin_details()
        return text, tokens, meta

    def last_response(
        self, usage: wire.Usage | None = None, delivered: wire.Delivered | None = None
    ) -> tuple[str, wire.Meta]:
        """Return the last response of a complete answer, with everything that was not sent before.

        Args:
            usage: the whole request's usage; for its final response.
            delivered: what was sent over a delta channel; for the last response of such an answer.
        """
        text, tokens, details = self.next_delta()
        details = details or wire.Meta()
        return text, wire.Meta(
            index=self.index,
            tokens=tokens,
            token_ids=details.token_ids,
            logprobs=details.logprobs,
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
        generation = self._generation
        return generation.include_stop and (generation.show_special or bool(self._tokenizer.piece(token_id)))

    def _add_text(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is not None:
            self._logprobs.append(_wire_logprob(self._tokenizer, logprobs))
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


class State(enum.Enum):
    """PREPARING -> ACCEPTED -> CLOSED, or PREPARING -> CLOSED for a refusal."""

    PREPARING = enum.auto()
    """Being compiled, rendered and tokenized; nothing was sent."""
    ACCEPTED = enum.auto()
    """In the engine, and the client knows."""
    CLOSED = enum.auto()
    """The final response was sent."""


class Owner(Protocol):
    """What is called as a request goes on, on the sender's thread."""

    def choice_closed(self, choice: Choice) -> None:
        """Note that a choice's last response was sent, and others are still open."""

    def request_closed(self, request: "OpenRequest", code: RefusalCode | None) -> None:
        """Note that the final response was sent; `code` is that of the refusal, None if it was answered."""

    def cancel(self, request: "OpenRequest") -> None:
        """End a request whose client has left."""


class OpenRequest(Call):
    """A generation, and its own call.

    Its methods belong to the sender's thread, so its state changes there alone; the intake fills in
    what it learns before it posts `accept`. The first choice that ends with an error ends the request with
    that error.

    Attributes:
        state: see `State`.
        cancelled: set by `Owner.cancel`, so that a request that is not in the engine yet never gets there.
        choices: empty until the prompt was tokenized.
        channel: where the deltas go; None: the answer is not streamed.
        streams: the choices' numbers on the channel.
        received: monotonic seconds.
        queued: when it was put on the engine's waiting list, in monotonic seconds; None until then.
        prompt_tokens: length of the prompt.
    """

    def __init__(self, key: str, generation: Generation, responder: Responder, owner: Owner) -> None:
        super().__init__(key, responder)
        self.generation = generation
        self.state = State.PREPARING
        self.cancelled = False
        self.choices: Sequence[Choice] = ()
        self.channel: DeltaChannel | None = None
        self.streams = range(0)
        self.received = self.last_sent
        self.queued: float | None = None
        self.prompt_tokens = 0
        self._owner = owner
        self._early: list[partial[None]] = []
        """What the engine's outputs have led to before `accept`, which the client must get first."""

    @property
    def deadline(self) -> float | None:
        """When the request is given up, in monotonic seconds; None: never."""
        limit_ms = self.generation.deadline_ms
        return None if limit_ms is None else self.received + limit_ms / 1000

    def given_up(self) -> tuple[RefusalCode, str] | None:
        """Return the refusal if the request was cancelled or its deadline has passed, else None."""
        if self.cancelled:
            return _REFUSALS[FinishReason.CANCELLED]
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return _REFUSALS[FinishReason.DEADLINE]
        return None

    def gone(self) -> None:
        """Cancel the request."""
        self._owner.cancel(self)

    def accept(self, accepted: wire.Accepted) -> None:
        """Tell the client that the request is queued, then what has happened to it meanwhile."""
        if self.state is not State.PREPARING:
            return
        self.send("", wire.Meta(accepted=accepted))
        self.state = State.ACCEPTED
        early, self._early = self._early, []
        for action in early:
            action()

    def tell_prompt(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> None:
        """Send the log-probabilities of the next tokens of the prompt."""
        if self.state is State.PREPARING:
            self._early.append(partial(self.tell_prompt, choice, logprobs))
        elif self.state is State.ACCEPTED and choice.report is not None:
            for part in choice.report.take(logprobs):
                self.send("", wire.Meta(index=choice.index, prompt_logprobs=part))

    def end(self, choice: Choice, *, lost: bool) -> None:
        """Send the last response of a choice that has ended; the last of all is the final one.

        `lost`: whether the channel of its deltas was lost.
        """
        if self.state is State.PREPARING:
            self._early.append(partial(self.end, choice, lost=lost))
            return
        if self.state is State.CLOSED or choice.closed_at is not None:
            return
        choice.closed_at = time.monotonic()
        if lost:
            self.refuse(RefusalCode.CHANNEL_LOST, "the delta channel was lost under the request")
        elif not choice.complete:
            code, message = _REFUSALS[choice.finish or FinishReason.ERROR]
            self.refuse(code, f"{message}: {choice.error}" if choice.error else message)
        elif any(each.closed_at is None for each in self.choices):
            self.send(*choice.last_response(delivered=self._delivered(choice)))
            self._owner.choice_closed(choice)
        else:
            self.send(*choice.last_response(self._usage(), self._delivered(choice)), final=True)
            self._close(None)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error, unless it has ended."""
        if self.state is not State.CLOSED:
            super().refuse(code, message)
            self._close(code)

    def keep_alive(self, now: float, silence_s: float) -> None:
        """Send a heartbeat if the request is accepted and nothing was sent for `silence_s` seconds."""
        if self.state is State.ACCEPTED and now - self.last_sent >= silence_s:
            self.send("", wire.Meta())

    def _close(self, code: RefusalCode | None) -> None:
        self.state = State.CLOSED
        self._owner.request_closed(self, code)

    def _usage(self) -> wire.Usage:
        return wire.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            # The least: the other choices also found in the cache what the first one computed.
            cached_tokens=min(choice.cached_tokens for choice in self.choices),
        )

    def _delivered(self, choice: Choice) -> wire.Delivered | None:
        if self.channel is None:
            return None
        return wire.Delivered(deltas=choice.deltas, frame=self.channel.last_frame)


def _wire_logprob(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> wire.TokenLogprob:
    token, utf8 = tokenizer.display(logprobs.id)
    return wire.TokenLogprob(
        id=logprobs.id,
        token=token,
        bytes=list(utf8),
        logprob=max(logprobs.logprob, LOGPROB_FLOOR),
        top=_top(tokenizer, logprobs),
    )


def _top(tokenizer: Tokenizer, logprobs: TokenLogprobs) -> list[wire.TopLogprob]:
    found = []
    for token_id, logprob in logprobs.top:
        token, utf8 = tokenizer.display(token_id)
        found.append(
            wire.TopLogprob(id=token_id, token=token, bytes=list(utf8), logprob=max(logprob, LOGPROB_FLOOR))
        )
    return found
