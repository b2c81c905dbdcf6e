"""Reading the answers of our own contract (package `wire`): outputs response and meta, BYTES [1, 1].

Strict: what is not in the contract is an error, never a guess.
"""

from collections.abc import Sequence
from operator import itemgetter

import msgspec
from tritonclient.grpc import service_pb2

from gateway.chatglm.answer_text import AnswerText, ContinuedText, by_segment
from gateway.chatglm.constrained_text import ConstrainedText
from gateway.chatglm.formats import chat_form
from gateway.chatglm.text_tokens import Told, in_runs, pieces_of
from gateway.chatglm.tool_offer import answer_metadata, call_rules, callable_names
from gateway.chatglm.tool_text import ToolText
from gateway.dialects.base import AnswerDelta, ModelReport
from gateway.errors import UpstreamProtocolError
from gateway.generation import (
    Accepted,
    Conversation,
    Delta,
    Event,
    FinishReason,
    Generation,
    Heartbeat,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    Turns,
    Usage,
)
from gateway.pieces import CallPart, Piece
from wire import meta as wire_meta
from wire import names
from wire.strings import unpack_strings

_HEARTBEAT = wire_meta.Meta()

_index = itemgetter(0)


class _RawText:
    """The text of an answer to a conversation in the format's own turns: as the model wrote it."""

    def push(self, text: str, segments: Sequence[wire_meta.Segment] = ()) -> str:
        """Take one delta; return all of it.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        for _ in by_segment(text, segments):
            pass
        return text

    def finish(self) -> str:
        """Return what was held back: nothing."""
        return ""


class _Choice:
    """The visible part of one choice: its text with its tokens, and its calls."""

    def __init__(self, generation: Generation, report: ModelReport) -> None:
        self._any_calls = False
        self._text = _shown_text(generation, report)

    def push_text(self, text: str) -> tuple[Piece, ...]:
        """Take one delta of text only; return what can be shown."""
        if isinstance(self._text, ToolText):
            return pieces_of(self._noted(self._text.push(text)))
        shown = self._text.push(text)
        return (shown,) if shown else ()

    def push(
        self, text: str, segments: Sequence[wire_meta.Segment], logprobs: Sequence[TokenLogprob]
    ) -> tuple[Told, ...]:
        """Take one delta, the segments that begin in it and its tokens; return what can be shown.

        Raises:
            ValueError: a segment begins outside `text`, before the one ahead of it, or where there are none.
        """
        if isinstance(self._text, ToolText):
            return self._noted(self._text.push(text, segments, logprobs))
        shown = self._text.push(text, segments)
        return (shown, *logprobs) if shown else tuple(logprobs)

    def finish(self) -> tuple[Told, ...]:
        """Return what was held back; the choice is over."""
        if isinstance(self._text, ToolText):
            return self._noted(self._text.finish())
        shown = self._text.finish()
        return (shown,) if shown else ()

    def _noted(self, told: tuple[Told, ...]) -> tuple[Told, ...]:
        self._any_calls = self._any_calls or any(isinstance(each, CallPart) for each in told)
        return told

    def reason(self, reason: wire_meta.FinishReason | None) -> FinishReason | None:
        """Return the finish reason, if it ended; all of its pieces were returned before.

        If a stop of the request's own ended it within a call, the reason is not `tool_calls`.
        """
        cut = isinstance(self._text, ToolText) and self._text.cut
        return "tool_calls" if reason == "stop" and self._any_calls and not cut else reason


def _shown_text(
    generation: Generation, report: ModelReport
) -> AnswerText | ContinuedText | ToolText | _RawText:
    """Return a reader that separates one raw choice of `generation` into text and calls."""
    prompt = generation.prompt
    if isinstance(prompt, Turns):
        return _RawText()
    if not isinstance(prompt, Conversation):
        return ContinuedText()
    offer, grammar = prompt.offer, generation.grammar
    if grammar is not None and (offer is None or offer.choice == "none"):
        return ContinuedText()  # Text that follows a grammar is shown unchanged, white space included.
    tools = chat_form(report.chat_format).tools
    if offer is None or tools is None:
        return AnswerText()
    rules = call_rules(offer, grammar)
    return ToolText(
        callable_names(offer),
        tools.read if rules is None else tools.read_enforced,
        metadata=answer_metadata(offer),
        text=ConstrainedText() if rules is not None and rules.text is not None else AnswerText(),
    )


class ChatGLMAnswer:
    """Reads one answer: `accepted`, then deltas and heartbeats.

    Each choice's last delta has its finish reason; the very last one also has the usage. The deltas of a
    streamed answer come from its channel, everything else from the request's own stream. Neither waits for
    the other: deltas that overtake the log-probabilities of the prompt are kept until all of these are there.

    Args:
        generation: the request.
        report: of the model that answers.
    """

    def __init__(self, generation: Generation, report: ModelReport) -> None:
        self._choices = {index: _Choice(generation, report) for index in range(generation.n)}
        """The choices that have not ended."""
        self._accepted = False
        self._wants_ranks = generation.prompt_ranks
        self._with_segments = isinstance(generation.prompt, Turns)
        self._prompt_tokens = 0
        self._unscored = {} if generation.prompt_logprobs is None else dict.fromkeys(self._choices, 0)
        """By choice, how many log-probabilities of the prompt have come; without those that are complete."""
        self._kept: list[AnswerDelta] = []
        """Deltas of those choices."""

    def decode(self, response: service_pb2.ModelInferResponse) -> list[Event]:
        """Return the events in `response`.

        Raises:
            UpstreamProtocolError: it cannot be understood, or comes out of order.
        """
        text, meta = read(response)
        if not self._accepted:
            self._accepted = True
            accepted = _accepted(text, meta)
            self._prompt_tokens = accepted.prompt_tokens
            return [accepted]
        self._check_order(meta)
        if not text and meta == _HEARTBEAT:
            return [Heartbeat()]
        kept = self._count_prompt_logprobs(meta)
        events = self._delta(meta.index, text, meta.tokens, meta)
        return events + self.deltas(kept) if kept else events

    @property
    def complete(self) -> bool:
        """Whether the final response was read."""
        return not self._choices

    def end(self) -> None:
        """Check, when no response is left, that the final one was seen.

        Raises:
            UpstreamProtocolError: it was not.
        """
        if self._choices:
            raise not_understood("it ended without its final response")

    def delivered(self, response: service_pb2.ModelInferResponse) -> tuple[int, wire_meta.Delivered] | None:
        """Return the choice that `response` ends, and how much of it must have come over the channel.

        Raises:
            UpstreamProtocolError: it cannot be understood, or ends a choice without saying so.
        """
        _, meta = read(response)
        if meta.finish_reason is not None and meta.delivered is None:
            raise not_understood("an end that does not say what came over the channel")
        return None if meta.delivered is None else (meta.index, meta.delivered)

    def deltas(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        """Return the events in the deltas from the channel, choice by choice, with plain text joined.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        if len(deltas) == 1 and not self._unscored:  # the common case
            index, text, tokens, document = deltas[0]
            if document is None:
                return [self._plain(index, text, tokens)] if tokens else []
            return self._detailed(index, text, tokens, document)
        if self._unscored:
            self._kept += [delta for delta in deltas if delta[0] in self._unscored]
            deltas = [delta for delta in deltas if delta[0] not in self._unscored]
        events: list[Event] = []
        choice, text, tokens = 0, "", 0
        # The sort is stable: the order within a choice stays.
        for index, added, count, document in sorted(deltas, key=_index):
            if (tokens or text) and (index != choice or document is not None):
                events.append(self._plain(choice, text, tokens))
                text, tokens = "", 0
            choice = index
            if document is None:
                text += added
                tokens += count
            else:
                events += self._detailed(index, added, count, document)
        if tokens or text:
            events.append(self._plain(choice, text, tokens))
        return events

    def _detailed(self, index: int, text: str, tokens: int, document: bytes) -> list[Event]:
        try:
            meta = wire_meta.decode_meta(document)
        except msgspec.MsgspecError as error:
            raise not_understood(str(error)) from error
        self._check_order(meta)
        if meta.finish_reason is not None:
            raise not_understood("an end over the channel")
        if meta.prompt_logprobs is not None:
            raise not_understood("log-probabilities of the prompt over the channel")
        if meta.index:
            raise not_understood("a choice is named beside its number on the channel")
        return self._delta(index, text, tokens, meta)

    def _count_prompt_logprobs(self, meta: wire_meta.Meta) -> list[AnswerDelta]:
        """Count those in `meta`; return the deltas that were kept until the last of them."""
        count = self._unscored.get(meta.index)
        if count is None:
            return []
        count += len(meta.prompt_logprobs or ())
        if count < self._prompt_tokens:
            if meta.finish_reason is not None or meta.tokens:
                raise not_understood("not all log-probabilities of the prompt came before the answer")
            self._unscored[meta.index] = count
            return []
        del self._unscored[meta.index]
        kept = [delta for delta in self._kept if delta[0] == meta.index]
        self._kept = [delta for delta in self._kept if delta[0] != meta.index]
        return kept

    def _delta(self, index: int, text: str, tokens: int, meta: wire_meta.Meta) -> list[Event]:
        """Return the events for a choice's delta of `tokens` tokens; `meta` has the rest of it.

        It is more than one if text follows a call, so that all log-probabilities in one are of one text.
        """
        scored = meta.logprobs is not None
        try:
            choice = self._choice(index)
            told = choice.push(text, meta.segments or (), _logprobs(meta.logprobs or ()))
        except ValueError as error:
            raise not_understood(str(error)) from error
        if meta.finish_reason is not None:
            told = (*told, *choice.finish())
            del self._choices[index]
            if (meta.usage is None) == (not self._choices):
                raise not_understood("usage belongs to the end of the last choice")
        prompt_logprobs = self._prompt_logprobs(meta.prompt_logprobs)
        segments = tuple(meta.segments or ()) if self._with_segments else ()
        if meta.finish_reason is None and not (told or tokens or prompt_logprobs or segments):
            return [Heartbeat()]
        *before, (pieces, logprobs) = in_runs(told) if scored else [(pieces_of(told), ())]
        return [
            *(
                Delta(pieces=earlier, tokens=0, index=index, logprobs=theirs if scored else None)
                for earlier, theirs in before
            ),
            Delta(
                pieces=pieces,
                tokens=tokens,
                index=index,
                token_ids=_ids(meta.token_ids),
                logprobs=logprobs if scored else None,
                prompt_logprobs=prompt_logprobs,
                segments=segments,
                finish_reason=choice.reason(meta.finish_reason),
                stop_reason=meta.stop_reason,
                usage=_usage(meta.usage),
            ),
        ]

    def _plain(self, index: int, text: str, tokens: int) -> Delta:
        """Return the event for a delta of text only."""
        return Delta(pieces=self._choice(index).push_text(text), tokens=tokens, index=index)

    def _prompt_logprobs(self, logprobs: list[wire_meta.PromptLogprob] | None) -> tuple[PromptLogprob, ...]:
        for each in logprobs or ():
            if (each.rank is not None) != (self._wants_ranks and each.logprob is not None):
                raise not_understood("ranks belong to the log-probabilities that they were asked for with")
        return tuple(
            PromptLogprob(
                id=each.id,
                token=each.token,
                utf8=_utf8(each.bytes),
                logprob=each.logprob,
                top=_top(each.top),
                rank=each.rank,
            )
            for each in logprobs or ()
        )

    def _choice(self, index: int) -> "_Choice":
        choice = self._choices.get(index)
        if choice is None:
            raise not_understood(f"choice {index} has ended, or was not asked for")
        return choice

    def _check_order(self, meta: wire_meta.Meta) -> None:
        if not self._choices:
            raise not_understood("a response after the final one")
        if meta.accepted is not None:
            raise not_understood("accepted twice")
        if meta.probe is not None or meta.cancelled is not None or meta.tokenized is not None:
            raise not_understood("the answer to another kind of request")
        if meta.usage is not None and meta.finish_reason is None:
            raise not_understood("usage before the end")


def _accepted(text: str, meta: wire_meta.Meta) -> Accepted:
    """Read the first response, which holds only `accepted`."""
    if meta.accepted is None or text or meta != wire_meta.Meta(accepted=meta.accepted):
        raise not_understood("it does not begin with accepted alone")
    ids = _ids(meta.accepted.prompt_token_ids)
    return Accepted(
        prompt_tokens=meta.accepted.prompt_tokens, prompt_token_ids=None if ids is None else (ids,)
    )


def _usage(usage: wire_meta.Usage | None) -> Usage | None:
    if usage is None:
        return None
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _ids(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _logprobs(logprobs: Sequence[wire_meta.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            id=sampled.id,
            token=sampled.token,
            utf8=_utf8(sampled.bytes),
            logprob=sampled.logprob,
            top=_top(sampled.top),
        )
        for sampled in logprobs
    )


def _top(top: Sequence[wire_meta.TopLogprob]) -> tuple[TopLogprob, ...]:
    return tuple(
        TopLogprob(id=each.id, token=each.token, utf8=_utf8(each.bytes), logprob=each.logprob) for each in top
    )


def _utf8(values: list[int]) -> bytes:
    try:
        return bytes(values)
    except ValueError as error:
        raise not_understood("a token's bytes are not bytes") from error


def read(response: service_pb2.ModelInferResponse) -> tuple[str, wire_meta.Meta]:
    """Return the text and the document of one response.

    Raises:
        UpstreamProtocolError: it has no such outputs, or they cannot be understood.
    """
    tensors = {
        tensor.name: raw for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    try:
        (text,) = unpack_strings(tensors[names.RESPONSE])
        (document,) = unpack_strings(tensors[names.META])
        return text.decode(), wire_meta.decode_meta(document)
    except KeyError as error:
        raise not_understood(f"no output {error}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        # ValueError: not one string, a cut tensor, not UTF-8.
        raise not_understood(str(error)) from error


def not_understood(what: str) -> UpstreamProtocolError:
    """Return the error for an answer that violates the contract."""
    return UpstreamProtocolError(f"The model's answer could not be understood: {what}.")
