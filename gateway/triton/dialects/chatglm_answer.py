"""Reading the answers of our own contract (package `wire`): outputs response and meta, BYTES [1, 1].

Strict: what is not in the contract is an error, never a guess.
"""

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter

import msgspec
from msgspec import structs

from gateway.chat.answers import ChoiceReader
from gateway.chat.marked import MarkedChoice
from gateway.chat.text_tokens import Run, TextTokens
from gateway.core.events import (
    Accepted,
    Delta,
    Event,
    Heartbeat,
    LogitsPart,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from gateway.core.request import Conversation, Generation, Turns
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.base import AnswerDelta, ModelReport, Response
from gateway.triton.dialects.model_text import RenderedPrompt, no_template
from wire import meta as wire_meta
from wire import names
from wire.strings import unpack_strings

_HEARTBEAT = wire_meta.Meta()

_FLOAT_BYTES = 4

_index = itemgetter(0)


class ChatGLMAnswer:
    """Reads one answer: `accepted`, which heartbeats may precede, then deltas and heartbeats.

    Each choice's last delta has its finish reason; the very last one also has the usage. The deltas of a
    streamed answer come from its channel, everything else from the request's own stream. Neither waits for
    the other: deltas that overtake the log-probabilities of the prompt are kept until all of these are there.

    After `resume` the rest of the answer is read from another call: the state of each choice stays, what was
    kept is forgotten and comes again, and the usage is completed by what had ended before.

    Args:
        generation: the request.
        report: of the model that answers.
        reader: makes what reads a choice; None: it is read as the model's chat format writes it.
        count: counts the tokens of reasoning, which the engine does not tell from text; None: there is none.

    Raises:
        NoTemplateError: the request is a conversation, and nobody knows how the model writes those.
    """

    over = False  # the engine ends an answer where the request says

    def __init__(
        self,
        generation: Generation,
        report: ModelReport,
        reader: Callable[[], ChoiceReader | MarkedChoice] | None = None,
        count: Callable[[str], int] | None = None,
    ) -> None:
        if reader is None and report.chat_format is None and isinstance(generation.prompt, Conversation):
            raise no_template()
        new = reader or (lambda: ChoiceReader(generation, report.chat_format))
        self._choices = {index: new() for index in range(generation.n)}
        """The choices that have not ended."""
        prompt = generation.prompt
        converses = (
            prompt.converses if isinstance(prompt, RenderedPrompt) else isinstance(prompt, Conversation)
        )
        scored = self._choices if converses and generation.logprobs is not None else ()
        self._listed = {index: TextTokens(special=generation.show_special) for index in scored}
        """Not of answers that continue a text, which list every token: who scores texts counts them."""
        self._accepted = False
        self._wants_ranks = generation.prompt_ranks
        self._with_segments = isinstance(generation.prompt, Turns)
        self._prompt_tokens = 0
        self._unscored = {} if generation.prompt_logprobs is None else dict.fromkeys(self._choices, 0)
        """By choice, how many log-probabilities of the prompt have come; without those that are complete."""
        self._kept: list[AnswerDelta] = []
        """Deltas of those choices."""
        self._resumable = generation.resumable
        self._ids: dict[int, list[int]] = {index: [] for index in self._choices}
        """The tokens of the deltas that were read, by choice, if the generation is resumable."""
        self._counted: dict[int, int] = dict.fromkeys(self._choices, 0)
        """By choice, the tokens that the request's own stream has told of."""
        self._recounted: dict[int, int] = {}
        """By choice, how many of them are told of again after `resume`, and count no more."""
        self._ended_tokens = 0
        """How many tokens the choices had that have ended."""
        self._count = count
        self._reasoning_tokens = 0
        """How many of them were reasoning, without its marks."""
        self._ended_before: int | None = None
        """How many of them had ended at `resume`; None: it was not called."""
        self._repeated: dict[int, int] = {}
        """By choice, how many log-probabilities of the prompt come again after `resume`, and are left out."""

    def resume(self) -> tuple[tuple[int, ...] | None, ...]:  # noqa: D102 - inherited
        self._accepted = False
        self._kept = []
        self._recounted = dict(self._counted)
        self._ended_before = self._ended_tokens
        self._repeated = {index: self._unscored.get(index, self._prompt_tokens) for index in self._choices}
        return tuple(
            tuple(self._ids[index]) if index in self._choices else None for index in range(len(self._ids))
        )

    def decode(self, response: Response) -> list[Event]:  # noqa: D102 - inherited
        text, meta = read(response)
        if not self._accepted:
            if not text and meta == _HEARTBEAT:
                return []  # it is still being prepared
            self._accepted = True
            accepted = _read_accepted(text, meta)
            if self._ended_before is not None and accepted.prompt_tokens != self._prompt_tokens:
                raise not_understood("the server that resumes it reads another prompt")
            self._prompt_tokens = accepted.prompt_tokens
            return [accepted]
        self._check_order(meta)
        if self._repeated and meta.prompt_logprobs is not None:
            meta = self._unread(meta)
        if not text and meta == _HEARTBEAT:
            return [Heartbeat()]
        kept = self._count_prompt_logprobs(meta)
        events = self._delta(meta.index, text, self._new_tokens(meta), meta)
        return events + self.deltas(kept) if kept else events

    def _new_tokens(self, meta: wire_meta.Meta) -> int:
        """Return how many tokens a response of the request's own stream tells of for the first time."""
        index = meta.index
        known = min(self._recounted.get(index, 0), meta.tokens)
        if known:
            self._recounted[index] -= known
        new = meta.tokens - known
        self._counted[index] = self._counted.get(index, 0) + new
        return new

    @property
    def complete(self) -> bool:  # noqa: D102 - inherited
        return not self._choices

    def end(self) -> Sequence[Event]:
        """See `AnswerDecoder.end`; the final response told everything."""
        if self._choices:
            raise not_understood("it ended without its final response")
        return ()

    def delivered(self, response: Response) -> tuple[int, wire_meta.Delivered] | None:
        """See `ChannelDecoder.delivered`."""
        _, meta = read(response)
        if meta.finish_reason is not None and meta.delivered is None:
            raise not_understood("an end that does not say what came over the channel")
        return None if meta.delivered is None else (meta.index, meta.delivered)

    def deltas(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        """See `ChannelDecoder.deltas`; they come choice by choice, with plain text joined."""
        if self._unscored:
            self._kept += [delta for delta in deltas if delta[0] in self._unscored]
            deltas = [delta for delta in deltas if delta[0] not in self._unscored]
        if self._resumable:
            for index, _, tokens, ids, _ in deltas:
                known = self._ids.get(index)
                if known is None or len(ids) != tokens:
                    raise not_understood(f"{len(ids)} ids of {tokens} tokens of choice {index}")
                known += ids
        if len(deltas) == 1:  # the common case
            index, text, tokens, _, document = deltas[0]
            if document is None:
                if not tokens:
                    return []
                reader = self._choices.get(index) or self._choice(index)
                return [Delta(pieces=reader.push(text), tokens=tokens, index=index)]
            return self._detailed(index, text, tokens, document)
        return self._joined(deltas)

    def _joined(self, deltas: Sequence[AnswerDelta]) -> list[Event]:
        events: list[Event] = []
        choice, text, tokens = 0, "", 0
        # The sort is stable: the order within a choice stays.
        for index, added, count, _, document in sorted(deltas, key=_index):
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

    def _unread(self, meta: wire_meta.Meta) -> wire_meta.Meta:
        """Return `meta` without the log-probabilities of the prompt that were read before `resume`."""
        logprobs, repeated = meta.prompt_logprobs or [], self._repeated.get(meta.index, 0)
        self._repeated[meta.index] = max(0, repeated - len(logprobs))
        return structs.replace(meta, prompt_logprobs=logprobs[repeated:] or None)

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
        choice, over = self._choice(index), meta.finish_reason is not None
        try:
            pieces = choice.push(text, meta.segments or ())
        except ValueError as error:
            raise not_understood(str(error)) from error
        if over:
            pieces += choice.finish()
            del self._choices[index]
            self._ended_tokens += len(self._ids[index]) + self._counted[index]
            if self._count is not None and isinstance(choice, MarkedChoice) and choice.thoughts:
                self._reasoning_tokens += self._count("".join(choice.thoughts))
            if (meta.usage is None) == (not self._choices):
                raise not_understood("usage belongs to the end of the last choice")
        prompt_logprobs = self._prompt_logprobs(meta.prompt_logprobs)
        logprobs = None if meta.logprobs is None else _logprobs(meta.logprobs)
        before: list[Run] = []
        if (listed := self._listed.get(index)) is not None:
            listed.push(text, logprobs or ())
            *before, (pieces, logprobs) = listed.take(pieces, choice.hidden, over=over)
        segments = tuple(meta.segments or ()) if self._with_segments else ()
        if not (over or pieces or before or logprobs or tokens or prompt_logprobs or segments):
            return [Heartbeat()]
        return [
            *(Delta(pieces=earlier, tokens=0, index=index, logprobs=theirs) for earlier, theirs in before),
            Delta(
                pieces=pieces,
                tokens=tokens,
                index=index,
                token_ids=_ids(meta.token_ids),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                segments=segments,
                finish_reason=choice.reason(meta.finish_reason),
                stop_reason=meta.stop_reason,
                usage=None if meta.usage is None else self._whole(_usage(meta.usage, meta.queue_s)),
            ),
        ]

    def _whole(self, usage: Usage) -> Usage:
        """Return the usage of an answer, perhaps a resumed one, given what its last server tells."""
        if self._ended_before is not None:
            # That one knows nothing of choices that had ended, and none how long it waited at the first.
            tokens = usage.completion_tokens + self._ended_before
            usage = dataclasses.replace(usage, completion_tokens=tokens, queue_s=None)
        if self._count is None:
            return usage
        return dataclasses.replace(
            usage, reasoning_tokens=min(usage.completion_tokens, self._reasoning_tokens)
        )

    def _plain(self, index: int, text: str, tokens: int) -> Delta:
        """Return the event for a delta of text only."""
        return Delta(pieces=self._choice(index).push(text), tokens=tokens, index=index)

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

    def _choice(self, index: int) -> ChoiceReader | MarkedChoice:
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


class LogitsAnswer:
    """Reads the logits of a prompt: `Accepted`, a delta for each part in order, and one with the usage."""

    over = False

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._told = 0
        """How many tokens' logits have come."""
        self._ended = False

    def decode(self, response: Response) -> list[Event]:  # noqa: D102 - inherited
        content, meta = _read_content(response)
        if not content and meta == _HEARTBEAT:
            return [] if self._accepted is None else [Heartbeat()]
        if self._accepted is None:
            self._accepted = _read_accepted(content, meta)
            return [self._accepted]
        if self._ended:
            raise not_understood("a response after the final one")
        if meta.logits is not None:
            return [self._part(content, meta)]
        return [self._end(content, meta, self._accepted)]

    def end(self) -> Sequence[Event]:  # noqa: D102 - inherited
        if not self._ended:
            raise not_understood("it ended without its final response")
        return ()

    def _part(self, content: bytes, meta: wire_meta.Meta) -> Delta:
        logits = meta.logits
        if logits is None or meta != wire_meta.Meta(logits=logits):
            raise not_understood("something beside logits")
        size = logits.vocabulary * _FLOAT_BYTES
        if logits.first != self._told or size <= 0 or not content or len(content) % size:
            raise not_understood("logits out of order, or of part of a token")
        self._told += len(content) // size
        return Delta(tokens=0, logits=LogitsPart(logits.first, logits.vocabulary, content))

    def _end(self, content: bytes, meta: wire_meta.Meta, accepted: Accepted) -> Delta:
        usage = meta.usage
        if content or meta.finish_reason is None or usage is None or meta.index:
            raise not_understood("neither logits nor their end")
        if self._told != accepted.prompt_tokens:
            raise not_understood(f"logits of {self._told} of {accepted.prompt_tokens} tokens")
        self._ended = True
        return Delta(tokens=0, finish_reason=meta.finish_reason, usage=_usage(usage, meta.queue_s))


def _usage(usage: wire_meta.Usage, queue_s: float | None) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        queue_s=queue_s,
    )


def _read_accepted(content: str | bytes, meta: wire_meta.Meta) -> Accepted:
    """Read the first response, which holds only `accepted`."""
    if meta.accepted is None or content or meta != wire_meta.Meta(accepted=meta.accepted):
        raise not_understood("it does not begin with accepted alone")
    ids = _ids(meta.accepted.prompt_token_ids)
    return Accepted(
        prompt_tokens=meta.accepted.prompt_tokens, prompt_token_ids=None if ids is None else (ids,)
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


def read(response: Response) -> tuple[str, wire_meta.Meta]:
    """Return the text and the document of one response.

    Raises:
        UpstreamProtocolError: it has no such outputs, or they cannot be understood.
    """
    content, meta = _read_content(response)
    if meta.logits is not None:
        raise not_understood("logits that were not requested")
    try:
        return content.decode(), meta
    except UnicodeDecodeError as error:
        raise not_understood(str(error)) from error


def _read_content(response: Response) -> tuple[bytes, wire_meta.Meta]:
    """Return what one response has, text in UTF-8 or logits, and its document.

    Raises:
        UpstreamProtocolError: it has no such outputs, or they cannot be understood.
    """
    try:
        (content,) = strings_of(response, names.RESPONSE)
        (document,) = strings_of(response, names.META)
        return content, wire_meta.decode_meta(document)
    except (ValueError, msgspec.MsgspecError) as error:  # ValueError: not one string
        raise not_understood(str(error)) from error


def strings_of(response: Response, output: str) -> list[bytes]:
    """Return the strings in one of a response's outputs.

    Raises:
        UpstreamProtocolError: it has no such output, or that cannot be understood.
    """
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == output:
            try:
                return unpack_strings(raw)
            except ValueError as error:
                raise not_understood(str(error)) from error
    raise not_understood(f"no output {output!r}")


def not_understood(what: str) -> UpstreamProtocolError:
    """Return the error for an answer that violates the contract."""
    return UpstreamProtocolError(f"The model's answer could not be understood: {what}.")
