"""The answers of text backends, made into events: text in deltas or so far, stop strings, ends, counts.

What a backend does not report is counted or inferred here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from gateway.chat.styles import possible_beginning
from gateway.chat.text_tokens import TextTokens
from gateway.core.events import Accepted, Delta, Event, FinishReason, Piece, TokenLogprob, Usage
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


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """More of an answer, as a backend reports it."""

    text: str
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
        generation: the request, for one choice.
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
        self._prompt_tokens: int | None = None
        self._marks = model.reader(prompt)
        self._listed = TextTokens() if prompt.converses and generation.logprobs is not None else None
        self._stops = tuple(generation.stop) if cut_stops else ()
        self._begun = [0] * len(self._stops)
        """How many characters at the text's end may begin each stop string: those before never will."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._stopped_by: str | None = None
        """The request's stop string that the text came to."""
        self._raw: list[str] = []
        """Its text as the backend sent it, for counting."""
        self._tokens = 0
        self._told = 0
        """How many of them the deltas have told of: only a stream's tell before the end when tokens came."""
        self._reported = False
        """Whether the backend counts its tokens."""
        self._finish: FinishReason | None = None
        """As far as it is known; more text is not read then."""

    @property
    def over(self) -> bool:
        """See `AnswerDecoder.over`: whether it came to a stop string, or to its only call."""
        return self._stopped_by is not None or self._marks.over

    def accept(self, prompt_tokens: int | None = None) -> list[Event]:
        """Return `Accepted` the first time, and the prompt that is to be repeated: the answer begins.

        `prompt_tokens` is as the backend counts them; None: it does not.
        """
        if self._prompt_tokens is not None:
            return []
        if prompt_tokens is None:
            prompt_tokens = self._prompt.tokens
        if prompt_tokens is None:
            prompt_tokens = self._model.count_prompt(self._prompt.text)
        self._prompt_tokens = prompt_tokens
        repeated = [Delta(pieces=(self._prompt.text,), tokens=0)] if self._generation.echo else []
        return [Accepted(prompt_tokens=prompt_tokens), *repeated]

    def take(self, news: News) -> list[Event]:
        """Return the events in more of the answer.

        Raises:
            UpstreamProtocolError: the backend did not finish it.
        """
        if self._finish is not None:
            return []
        tokens = 1 if news.tokens is None and news.text else news.tokens or 0
        self._reported |= news.tokens is not None
        if not self._reported:
            self._raw.append(news.text)
        self._tokens += tokens
        pieces = self._read(news.text, over=False)
        if news.finish in _FAILURES:
            raise UpstreamProtocolError("The model's backend gave up the answer.")
        if self.over:
            self._finish = "stop"
        elif news.finish is not None:
            self._finish = "length" if news.finish in _AT_LIMIT else "stop"
        *before, last = self._deltas(news.text, news.logprobs or (), pieces)
        if not (before or last.pieces or last.logprobs or tokens):
            return []
        told = tokens if self._generation.stream else 0
        self._told += told
        return [*before, structs.replace(last, tokens=told)]

    def rest(self, text: str) -> list[Event]:
        """Return the events in text that was held back: its tokens were counted already.

        Raises:
            UpstreamProtocolError: as `take`.
        """
        return self.take(News(text=text, tokens=0 if self._reported else None))

    def end(self) -> list[Event]:
        """Return the events of the answer's end, which a backend may come to without saying why.

        Counts what the backend does not, and so takes a while for a long answer.
        """
        events = self.accept()
        pieces = () if self._stopped_by is not None else self._read("", over=True)
        self._tokens = self._counted()
        usage = Usage(
            prompt_tokens=self._prompt_tokens or 0,
            completion_tokens=self._tokens,
            reasoning_tokens=self._reasoning() if self._prompt.thinks else None,
        )
        *deltas, last = self._deltas("", (), pieces, over=True)
        last = structs.replace(
            last,
            tokens=max(0, self._tokens - self._told),
            finish_reason=self._finish_reason(),
            stop_reason=self._stopped_by,
            usage=usage,
        )
        return [*events, *deltas, last]

    def _read(self, text: str, *, over: bool) -> tuple[Piece, ...]:
        """Return the pieces that are certain with more text, up to a stop string.

        That is the one that is complete first, as if the text came by character; of several, the longest.
        """
        known = len(self._held)
        text = self._held + text
        self._held = ""
        if self._stopped_by is None and self._stops:
            found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if found:
                end, at, stop = min(found)
                kept = end if self._generation.include_stop else at
                text, self._stopped_by, over = text[:kept], stop, True
            elif not over:
                each = zip(self._stops, self._begun, strict=True)
                self._begun = [possible_beginning(text[known - begun :], stop) for stop, begun in each]
                kept = len(text) - max(self._begun)
                text, self._held = text[:kept], text[kept:]
        read = self._marks.push(text)
        if over:
            read += self._marks.end()
        return tuple(read)

    def _deltas(
        self, text: str, logprobs: tuple[TokenLogprob, ...], pieces: tuple[Piece, ...], *, over: bool = False
    ) -> list[Delta]:
        """Return the deltas of more text, whose tokens are not counted: one, or one for each text in it."""
        if self._generation.logprobs is None:
            return [Delta(pieces=pieces, tokens=0)]
        if self._listed is None:
            return [Delta(pieces=pieces, tokens=0, logprobs=logprobs)]
        self._listed.push(text, logprobs)
        runs = self._listed.take(pieces, self._marks.hidden, over=over)
        return [Delta(pieces=run, tokens=0, logprobs=tokens) for run, tokens in runs]

    def _finish_reason(self) -> FinishReason:
        """Return why the answer ended, whose tokens were counted."""
        finish = self._finish
        if finish is None:
            finish = "stop" if self._limit is None or self._tokens < self._limit else "length"
        called = self._marks.called and not self._marks.cut
        return "tool_calls" if called and finish == "stop" else finish

    def _reasoning(self) -> int:
        """Return how many of the tokens are reasoning, without its marks."""
        if not self._marks.thoughts or self._model.vocabulary is None:
            return 0
        return min(self._tokens, self._model.vocabulary.count("".join(self._marks.thoughts)))

    def _counted(self) -> int:
        """Return the number of tokens: the backend's own count, or the tokenizer's of the text."""
        if self._reported or self._model.vocabulary is None:
            return self._tokens
        return self._model.vocabulary.count("".join(self._raw))


class TextOutputs(TextAnswer):
    """Reads the outputs that text backends have in common, those of them that a model has.

    `text_output` has a text, `num_input_tokens` a count of the prompt's tokens; `num_output_tokens` and
    `finish_reason` tell of the text. `before` is as for `Growth`.
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
        self._growth = Growth(before)

    def decode(self, response: Response) -> list[Event]:  # noqa: D102 - inherited
        found = outputs(response)
        events = self.accept(_first(found, "num_input_tokens"))
        texts = found.get("text_output", [])
        if len(texts) > 1:
            raise UpstreamProtocolError("The model's answer has more choices than were requested.")
        for text in texts:
            reason = _first(found, "finish_reason")
            finish = None if reason in _UNENDED else reason
            news = News(
                text=self._growth.push(text) + ("" if finish is None else self._growth.end()),
                tokens=_first(found, "num_output_tokens"),
                finish=finish,
                logprobs=self.logprobs_in(found),
            )
            events += self.take(news)
        return events

    def logprobs_in(self, found: Mapping[str, Sequence[Any]]) -> tuple[TokenLogprob, ...] | None:
        """Return the text's log-probabilities, which each backend that has some reports in its own way."""

    def end(self) -> list[Event]:  # noqa: D102 - inherited
        return self.rest(self._growth.end()) + super().end()


def _first(found: Mapping[str, Sequence[Any]], name: str) -> Any:
    """Return the first value of an output; None: there is none."""
    return next(iter(found.get(name, ())), None)


_UNENDED: Final = frozenset({None, "None", ""})
"""What they send as finish reason until there is one."""
_AT_LIMIT: Final = frozenset({"length", "timeout"})
"""What they call an end that is not the model's own."""
_FAILURES: Final = frozenset({"abort", "cancelled", "error"})
"""What they call it where it is none: nobody here asked for it."""
