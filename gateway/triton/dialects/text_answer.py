"""The answers of text backends, made into events: text in deltas or so far, stop strings, ends, counts.

What a backend does not report is counted or inferred here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.chat.marked import MarkedText, VisibleTokens
from gateway.chat.styles import possible_beginning
from gateway.core.events import Accepted, Delta, Event, FinishReason, Piece, Reasoning, TokenLogprob, Usage
from gateway.core.request import Generation
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects.base import Response
from gateway.triton.dialects.model_text import ModelText, RenderedPrompt
from gateway.triton.dialects.tensors import outputs

_DEFAULT_MAX_TOKENS: Final = 1024
"""Of an answer whose request sets no limit, where a backend demands one."""


def limit_of(generation: Generation) -> int:
    """Return how long an answer may be, for a backend that demands a limit."""
    return _DEFAULT_MAX_TOKENS if generation.max_tokens is None else generation.max_tokens


@dataclass(slots=True)
class _Choice:
    marks: MarkedText
    visible: VisibleTokens
    begun: list[int]
    """How many characters at the text's end may begin each stop string: those before never will."""
    raw: list[str] = field(default_factory=list)
    """Its text as the backend sent it, for counting."""
    held: str = ""
    """Text that may be the beginning of a stop string."""
    tokens: int = 0
    reported: bool = False
    """Whether the backend counts its tokens."""
    thoughts: list[str] = field(default_factory=list)
    """Its reasoning, for counting."""
    stopped_by: str | None = None
    """The request's stop string that the text came to."""
    finish: FinishReason | None = None
    """As far as it is known; more text is not read then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """More of one choice, as a backend reports it."""

    text: str
    index: int = 0
    tokens: int | None = None
    """How many tokens these are; None: the backend does not say."""
    finish: str | None = None
    """The backend's own finish reason."""
    logprobs: tuple[TokenLogprob, ...] | None = None


class Growth:
    """Makes deltas of one choice's text, where a backend sends either deltas or all of the text so far.

    All of the text so far begins with what came before, and a delta may do so by chance. So short text is
    held back until the next responses tell: text so far has grown twice, a delta does not begin with the one
    before it, or is empty. Text that merely comes again is either. If an answer ends so, text that came twice
    is the text so far, whose last token had no text; a third time it is a delta.

    All of the text so far may end with U+FFFD, in place of a character of which some bytes are missing: it is
    held back until the character is there, or the answer ends.

    Args:
        before: what all of the text so far may begin with, and is none of the choice: the prompt. None: each
            response has more of the text, never all of it.
    """

    _CERTAIN = 16
    """No delta begins by chance with so many characters that came before."""
    _REPEATED = 8
    """So often, text so far does not come again for want of a character's other bytes, or of text."""

    def __init__(self, before: str | None = "") -> None:
        self._prompt = before or ""
        """Until the first text tells whether it begins with that."""
        self._returned = ""
        """All of the text so far up to what was returned."""
        self._latest = ""
        self._held = ""
        """What was not returned, if they are deltas."""
        self._grown = self._repeated = 0
        """How often the text so far grew, and how often it came again since."""
        self._cumulative: bool | None = None if before is not None else False

    def push(self, text: str) -> str:
        """Return what is new, as far as it is certain."""
        if self._cumulative is False:
            return text
        if self._cumulative is None:
            if self._prompt and text:
                if text.startswith(self._prompt):
                    self._returned = self._latest = self._prompt
                self._prompt = ""
            if not self._latest:
                self._returned, self._latest = _whole(text), text
                self._held = text[len(self._returned) :]
                return self._returned
            self._cumulative = self._tell(text)
            self._held += text
            if self._cumulative is False:
                return self._held
        self._latest = text or self._latest
        new = _whole(text)[len(self._returned) :] if self._cumulative else ""
        self._returned += new
        return new

    def end(self) -> str:
        """Return what was held back."""
        if self._cumulative is False:
            return ""
        if self._cumulative is None and self._repeated > 1 and self._latest == self._returned:
            return self._held
        return self._latest[len(self._returned) :]

    def _tell(self, text: str) -> bool | None:
        """Return whether this is all of the text so far, once that is certain."""
        former = _whole(self._latest)
        if not text or not text.startswith(former):
            return False
        if former and len(_whole(text)) > len(former):
            self._grown, self._repeated = self._grown + 1, 0
            return True if self._grown > 1 or len(former) >= self._CERTAIN else None
        self._repeated += 1
        return False if self._repeated == self._REPEATED else None


def _whole(text: str) -> str:
    """Return text up to a character of which some bytes may be missing."""
    return text.rstrip("\ufffd")


class TextAnswer:
    """The answer of a text backend, made into events; how a response is read, each backend's own class says.

    Args:
        generation: the request.
        model: how its text reads.
        prompt: as it was sent.
        cut_stops: the backend may leave stop strings in its text.
        limit: of its tokens, as far as the backend was given one.
    """

    def __init__(
        self,
        generation: Generation,
        model: ModelText,
        prompt: RenderedPrompt,
        *,
        cut_stops: bool,
        limit: int | None,
    ) -> None:
        self._limit = limit
        self._generation = generation
        self._model = model
        self._prompt = prompt
        self._stops = tuple(generation.stop) if cut_stops else ()
        texts = (model.reader(prompt) for _ in range(generation.n))
        self._choices = [_Choice(marks, VisibleTokens(marks), [0] * len(self._stops)) for marks in texts]
        self._prompt_tokens: int | None = None

    @property
    def over(self) -> bool:
        """See `AnswerDecoder.over`: whether every choice came to a stop string, or to its only call."""
        return all(choice.stopped_by is not None or choice.marks.over for choice in self._choices)

    def accept(self, prompt_tokens: int | None = None) -> list[Event]:
        """Return `Accepted` the first time: the backend began to answer.

        Args:
            prompt_tokens: as the backend counts them; None: it does not.
        """
        if self._prompt_tokens is not None:
            return []
        if prompt_tokens is None:
            prompt_tokens = self._prompt.tokens
        if prompt_tokens is None:
            prompt_tokens = self._model.count_prompt(self._prompt.text)
        self._prompt_tokens = prompt_tokens
        return [Accepted(prompt_tokens=prompt_tokens)]

    def take(self, news: News) -> list[Event]:
        """Return the events in more of a choice.

        Raises:
            UpstreamProtocolError: there is no such choice, or the backend did not finish it.
        """
        choice = self._choice(news.index)
        if choice.finish is not None:
            return []
        tokens = 1 if news.tokens is None and news.text else news.tokens or 0
        choice.reported |= news.tokens is not None
        if not choice.reported:
            choice.raw.append(news.text)
        choice.tokens += tokens
        choice.visible.expect(news.text, news.logprobs or ())
        pieces = self._read(choice, news.text, over=False)
        if news.finish in _FAILURES:
            raise UpstreamProtocolError("The model's backend gave up the answer.")
        if choice.stopped_by is not None or choice.marks.over:
            choice.finish = "stop"
        elif news.finish is not None:
            choice.finish = "length" if news.finish in _AT_LIMIT else "stop"
        if not pieces and not tokens:
            return []
        return [Delta(pieces=pieces, tokens=tokens, index=news.index, logprobs=self._logprobs(choice))]

    def rest(self, text: str, index: int = 0) -> list[Event]:
        """Return the events in text of a choice that was held back: its tokens were counted already.

        Raises:
            UpstreamProtocolError: as `take`.
        """
        return self.take(News(text=text, index=index, tokens=0 if self._choice(index).reported else None))

    def end(self) -> list[Event]:
        """Return the events of the answer's end, which a backend may come to without saying why.

        Counts what the backend does not, and so takes a while for a long answer.
        """
        events = self.accept()
        usage = None
        for index, choice in enumerate(self._choices):
            pieces = () if choice.stopped_by is not None else self._read(choice, "", over=True)
            before, choice.tokens = choice.tokens, self._counted(choice)
            if index == len(self._choices) - 1:
                usage = self._usage()
            events.append(
                Delta(
                    pieces=pieces,
                    tokens=max(0, choice.tokens - before),
                    index=index,
                    logprobs=self._logprobs(choice, over=True),
                    finish_reason=self._finish(choice),
                    stop_reason=choice.stopped_by,
                    usage=usage,
                )
            )
        return events

    def _choice(self, index: int) -> _Choice:
        if index >= len(self._choices):
            raise UpstreamProtocolError("The model's answer has more choices than were requested.")
        return self._choices[index]

    def _read(self, choice: _Choice, text: str, *, over: bool) -> tuple[Piece, ...]:
        """Return the pieces that are certain with more text, up to a stop string.

        That is the one that is complete first, as if the text came by character; of several, the longest.
        """
        known = len(choice.held)
        text = choice.held + text
        choice.held = ""
        if choice.stopped_by is None and self._stops:
            found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                end, at, stop = min(found)
                kept = end if self._generation.include_stop else at
                text, choice.stopped_by, over = text[:kept], stop, True
            elif not over:
                each = zip(self._stops, choice.begun, strict=True)
                choice.begun = [possible_beginning(text[known - begun :], stop) for stop, begun in each]
                kept = len(text) - max(choice.begun)
                text, choice.held = text[:kept], text[kept:]
        read = choice.marks.push(text)
        if over:
            read += choice.marks.end()
        choice.thoughts += [piece.text for piece in read if isinstance(piece, Reasoning)]
        return tuple(read)

    def _logprobs(self, choice: _Choice, *, over: bool = False) -> tuple[TokenLogprob, ...] | None:
        """Return those of tokens that turned out to be text; None: they were not requested."""
        return None if self._generation.logprobs is None else tuple(choice.visible.shown(over=over))

    def _finish(self, choice: _Choice) -> FinishReason:
        """Return why a choice ended, whose tokens were counted."""
        finish = choice.finish
        if finish is None:
            finish = "stop" if self._limit is None or choice.tokens < self._limit else "length"
        called = choice.marks.called and not choice.marks.cut
        return "tool_calls" if called and finish == "stop" else finish

    def _usage(self) -> Usage:
        reasoning = sum(self._reasoning(each) for each in self._choices)
        return Usage(
            prompt_tokens=self._prompt_tokens or 0,
            completion_tokens=sum(each.tokens for each in self._choices),
            reasoning_tokens=reasoning if self._prompt.thinks else None,
        )

    def _reasoning(self, choice: _Choice) -> int:
        """Return how many of a choice's tokens are reasoning, without its marks."""
        if not choice.thoughts or self._model.vocabulary is None:
            return 0
        return min(choice.tokens, self._model.vocabulary.count("".join(choice.thoughts)))

    def _counted(self, choice: _Choice) -> int:
        """Return a choice's tokens: the backend's own count, or the tokenizer's of its text."""
        if choice.reported or self._model.vocabulary is None:
            return choice.tokens
        return self._model.vocabulary.count("".join(choice.raw))


class TextOutputs(TextAnswer):
    """Reads the outputs that text backends have in common, those of them that a model has.

    `text_output` has a text for each choice, `num_input_tokens` a count of the prompt's tokens;
    `num_output_tokens` and `finish_reason` tell of each text.

    Args:
        before: as for `Growth`.
        answer: what a `TextAnswer` takes.
    """

    def __init__(
        self,
        generation: Generation,
        model: ModelText,
        prompt: RenderedPrompt,
        *,
        before: str | None,
        **answer: Any,
    ) -> None:
        super().__init__(generation, model, prompt, **answer)
        self._growths = [Growth(before) for _ in self._choices]

    def decode(self, response: Response) -> list[Event]:
        """See `AnswerDecoder.decode`."""
        found = outputs(response)
        events = self.accept(next(iter(found.get("num_input_tokens", ())), None))
        counts, reasons = found.get("num_output_tokens", []), found.get("finish_reason", [])
        texts = found.get("text_output", [])
        if 0 < len(texts) < len(self._choices):
            raise UpstreamProtocolError(
                f"The model's backend answered with {len(texts)} of {len(self._choices)} choices."
            )
        for index, text in enumerate(texts):
            self._choice(index)
            reason = reasons[index] if index < len(reasons) and reasons[index] not in _UNENDED else None
            new = self._growths[index].push(text)
            news = News(
                text=new if reason is None else new + self._growths[index].end(),
                index=index,
                tokens=counts[index] if index < len(counts) else None,
                finish=reason,
                logprobs=self.logprobs_in(found, index),
            )
            events += self.take(news)
        return events

    def logprobs_in(self, found: Mapping[str, Sequence[Any]], index: int) -> tuple[TokenLogprob, ...] | None:
        """Return a text's log-probabilities, which each backend that has some reports in its own way."""

    def end(self) -> list[Event]:
        """See `AnswerDecoder.end`."""
        held = [self.rest(growth.end(), index) for index, growth in enumerate(self._growths)]
        return [event for events in held for event in events] + super().end()


_UNENDED: Final = frozenset({"None", ""})
"""What they send as finish reason until there is one."""
_AT_LIMIT: Final = frozenset({"length", "timeout"})
"""What they call an end that is not the model's own."""
_FAILURES: Final = frozenset({"abort", "cancelled", "error"})
"""What they call it where it is none: nobody here asked for it."""
