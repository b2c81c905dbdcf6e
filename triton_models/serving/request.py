"""One generation between its arrival and its final response: engine tokens in, response documents out."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import structs

from triton_models.engine.sequence import FinishReason, PromptLogits, TokenLogprobs, TokenOutput
from triton_models.errors import InvalidRequestError
from triton_models.serving.outbox import CANCELLED, LATE, UNLOADED, Call, Refusal, Responder
from triton_models.text.answer import AnswerDelta, AnswerStream
from triton_models.text.tokenizers import Tokenizer, shown_tokens
from wire import meta as wire
from wire.refusal import RefusalCode
from wire.request import Generation

if TYPE_CHECKING:
    from concurrent.futures import Future

    from triton_models.serving.channel import DeltaChannel
    from triton_models.serving.intake import Inputs
    from triton_models.serving.service import Service
    from triton_models.text.grammars import CompiledGrammar

LOGPROB_FLOOR: Final = -9999.0
"""Reported instead of minus infinity, which JSON cannot hold."""

RESPONSE_TOKENS: Final = 256
"""Most tokens of a prompt reported in one response, however many a step computed: with their alternatives, at
most half a megabyte, which takes a few milliseconds to read."""

LOGITS_BYTES: Final = 2 * 2**20
"""Most bytes of logits in one response, but those of one token at least: a millisecond's work, which nothing
on the other calls waits longer for, and far below what a message may have."""

_WIRE_REASONS: Final[dict[FinishReason | None, wire.FinishReason]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

_REFUSALS: Final[dict[FinishReason, Refusal]] = {
    FinishReason.CANCELLED: CANCELLED,
    FinishReason.DEADLINE: LATE,
    FinishReason.SHUTDOWN: UNLOADED,
    FinishReason.ERROR: (RefusalCode.INTERNAL, "the engine failed on this request"),
    FinishReason.FAULT: (RefusalCode.UNAVAILABLE, "the engine failed"),
    FinishReason.MASK: (RefusalCode.INVALID_GRAMMAR, "the answer ended early"),
}


def logits_parts(logits: PromptLogits) -> Iterator[PromptLogits]:
    """Split logits into what one response can hold."""
    values = logits.values
    count = max(1, LOGITS_BYTES // (values.shape[1] * values.itemsize))
    for at in range(0, len(values), count):
        yield PromptLogits(logits.first + at, values[at : at + count])


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
        counted_at: when its client was last told how many tokens there are, of an answer that is not
            streamed, in monotonic seconds.
        deltas: how many deltas went into the frames of a delta channel.
        resumed_tokens: how many of its tokens were sampled by another server, and are not sent again.
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
        self.counted_at = -math.inf
        self.deltas = 0
        self.resumed_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._generation = generation
        self._tokenizer = tokenizer
        self._stream = stream
        self._wants_ids = generation.return_token_ids
        self._keeps_ids = self._wants_ids or (generation.channel is not None and generation.channel.ids)
        self._wants_logprobs = generation.logprobs is not None
        self._wants_no_tokens = generation.max_tokens == 0
        self._stop_reason: int | str | None = None
        self._texts = [echo] if echo else []
        """Parts, which `next_delta` joins: without a channel they are the whole answer."""
        self._length = len(echo)
        self._tokens = 0
        self._token_ids: list[int] = []
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
        return bool(self._texts or self._segments)

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
            if self._keeps_ids:
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
        # An echo goes with the first token: whoever resumes the answer after a token has had it.
        return self.finish is not None or (self._tokens > 0 and self.sendable)

    def go_on(self, token_ids: Sequence[int]) -> None:
        """Continue after `token_ids`, whose text the client has; called before the first `take`.

        Raises:
            InvalidRequestError: the answer would have ended within them.
        """
        for token_id in token_ids:
            delta = self._stream.push(token_id)
            if delta.stopped is not None or delta.ended:
                raise InvalidRequestError("generated: the answer ended within these tokens")
        self.completion_tokens = self.resumed_tokens = len(token_ids)
        self._texts, self._length = [], 0

    def fail(self) -> None:
        """Give up the answer; its request then ends with an error."""
        self.finish = FinishReason.ERROR

    def next_delta(self) -> tuple[str, int, list[int], wire.Meta | None]:
        """Return and clear what has piled up.

        Returns:
            Text, number of tokens, their ids if a client needs them, and details if there are any.
        """
        text, tokens, ids = "".join(self._texts), self._tokens, self._token_ids
        self._texts, self._length, self._tokens, self._token_ids = [], 0, 0, []
        if not (self._segments or self._wants_ids or self._wants_logprobs):
            return text, tokens, ids, None
        meta = wire.Meta(
            token_ids=ids if self._wants_ids else None,
            logprobs=self._logprobs if self._wants_logprobs else None,
            segments=self._segments or None,
        )
        self._begin_details()
        return text, tokens, ids, meta

    def next_count(self) -> int:
        """Return and clear the number of tokens that have piled up; what there is of them stays."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def last_response(
        self, usage: wire.Usage | None = None, delivered: wire.Delivered | None = None
    ) -> tuple[str, wire.Meta]:
        """Return the last response of a complete answer, with everything that was not sent before.

        Args:
            usage: the whole request's usage; for its final response.
            delivered: what was sent over a delta channel; for the last response of such an answer.
        """
        text, tokens, _, details = self.next_delta()
        return text, structs.replace(
            details or wire.Meta(),
            index=self.index,
            tokens=tokens,
            finish_reason=_WIRE_REASONS.get(self.finish),
            stop_reason=self._stop_reason,
            usage=usage,
            delivered=delivered,
        )

    def _begin_details(self) -> None:
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
            self._segments += [wire.Segment(self._length + at, role) for at, role in delta.segments]
        if delta.text:
            self._texts.append(delta.text)
            self._length += len(delta.text)


class OpenRequest(Call):
    """A generation, and its own call.

    Its methods belong to the sender's thread; the intake's threads fill in what they learn before they post
    `accept`. The first choice that ends with an error ends the request with that error.

    Attributes:
        inputs: its tensors, until it is prepared.
        compiling: its grammar, if it has one, once somebody compiles it.
        choices: empty until the prompt was tokenized.
        channel: where the deltas go; None: the answer is not streamed.
        streams: the choices' numbers on the channel.
        received: monotonic seconds.
        queued: when it was put on the engine's waiting list, in monotonic seconds; None until then.
        prompt_tokens: length of the prompt.
    """

    has_heartbeats = True  # also before `accepted`: compiling a grammar takes longer than a gateway waits

    def __init__(
        self, key: str, generation: Generation, inputs: "Inputs", responder: Responder, owner: "Service"
    ) -> None:
        super().__init__(key, responder, deadline_ms=generation.deadline_ms)
        self.generation = generation
        self.inputs: Inputs | None = inputs
        self.compiling: Future[CompiledGrammar | None] | None = None
        self.choices: Sequence[Choice] = ()
        self.channel: DeltaChannel | None = None
        self.streams = range(0)
        self.received = self.last_sent
        self.queued: float | None = None
        self.prompt_tokens = 0
        self._owner = owner
        self._early: list[partial[None]] | None = []
        """What the engine's outputs have led to before `accept`, which the client must get first; None after
        it."""

    def gone(self) -> None:
        """Cancel the request."""
        self._owner.cancel(self)

    def accept(self, accepted: wire.Accepted) -> None:
        """Tell the client that the request is queued, then what has happened to it meanwhile."""
        self.send("", wire.Meta(accepted=accepted))
        early, self._early = self._early or [], None
        for action in early:
            action()

    def tell_prompt(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> None:
        """Send the log-probabilities of the next tokens of the prompt."""
        if self._early is not None:
            self._early.append(partial(self.tell_prompt, choice, logprobs))
        elif choice.report is not None:
            for part in choice.report.take(logprobs):
                self.send("", wire.Meta(index=choice.index, prompt_logprobs=part))

    def tell_logits(self, logits: PromptLogits) -> None:
        """Send the logits of the next tokens of the prompt, which one response can hold."""
        if self._early is not None:
            self._early.append(partial(self.tell_logits, logits))
        elif not (self.closed or self.cancelled):
            meta = wire.Meta(logits=wire.Logits(first=logits.first, vocabulary=logits.values.shape[1]))
            self.send(logits.values.numpy().tobytes(), meta)

    def tell_tokens(self, choice: Choice, tokens: int) -> None:
        """Tell of more tokens of an answer that is not streamed, whose text comes with its end."""
        if self._early is not None:
            self._early.append(partial(self.tell_tokens, choice, tokens))
        else:
            self.send("", wire.Meta(index=choice.index, tokens=tokens))

    def end(self, choice: Choice, *, lost: bool) -> None:
        """Send the last response of a choice that has ended; the last of all is the final one.

        `lost`: whether the channel of its deltas was lost.
        """
        if self._early is not None:
            self._early.append(partial(self.end, choice, lost=lost))
            return
        if self.closed or choice.closed_at is not None:
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
            text, meta = choice.last_response(self._usage(), self._delivered(choice))
            waited = (round(each.first_token[0], 6) for each in self.choices if each.first_token)
            self.send(text, structs.replace(meta, queue_s=min(waited, default=None)), final=True)
            self._owner.request_closed(self, None)

    def refuse(self, code: RefusalCode, message: str) -> None:
        """End the request with an error, unless it has ended."""
        if not self.closed:
            super().refuse(code, message)
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
    shown = ((token_id, *tokenizer.display(token_id), logprob) for token_id, logprob in logprobs.top)
    return [
        wire.TopLogprob(id=token_id, token=token, bytes=list(utf8), logprob=max(logprob, LOGPROB_FLOOR))
        for token_id, token, utf8, logprob in shown
    ]
