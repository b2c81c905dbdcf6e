"""Turns the token ids of one answer into text: detokenizing, segments and stop strings."""

from collections.abc import Iterable

import msgspec

from triton_models.text.formats import ChatFormat
from triton_models.text.tokenizers import Tokenizer
from wire.text import utf8_decoder


class AnswerDelta(msgspec.Struct, frozen=True):
    """The text that became final with one more token or at the end; the joined deltas are the answer.

    It is a msgspec struct because one is created for nearly every token, and that takes a quarter of the time
    of a frozen dataclass.

    Attributes:
        text: new text, often empty while a character or a possible stop string is incomplete.
        segments: (offset in `text` in code points, role) of each segment that begins in this delta.
        stopped: the stop string that ended the answer at this token, if one did; `text` ends before it.
        ended: the answer ended at this token, without a stop string.
    """

    text: str = ""
    segments: tuple[tuple[int, str], ...] = ()
    stopped: str | None = None
    ended: bool = False


_NOTHING = AnswerDelta()


class AnswerStream:
    """The text of one answer. Not thread-safe.

    Push all tokens up to the one that ended the answer, but not a stop id, which is not text. A special id
    never appears as text; one that opens a segment is reported as a boundary. Each segment is detokenized
    separately, as in training: its leading space is dropped, and no character spans two segments.

    Stop strings are matched from the first character of a segment that is not white space. What comes before
    it (ChatGLM3's empty first line for a tool's name) is not part of the answer: otherwise a stop string of
    one newline would end every answer before it began. No stop string matches across a boundary.

    A raw answer continues text instead of a conversation. It has no chat format, so all of it is one segment,
    which may begin with a space, and stop strings are matched from its first character, or with `blank_start`
    from the first that is not white space.

    With `show_special`, special tokens appear as text, by name, and none is a boundary.

    Attributes:
        tokens: number of tokens pushed, up to and including the one that completed a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        stops: Iterable[str] = (),
        min_tokens: int = 0,
        *,
        raw: bool = False,
        blank_start: bool = False,
        metadata: str | None = None,
        end_after_call_of: Iterable[str] = (),
        include_stop: bool = False,
        show_special: bool = False,
        echoes: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            tokenizer: the model's tokenizer.
            chat_format: the model's chat format.
            stops: the strings that end the answer, none of which is empty.
            min_tokens: stop strings that are complete before this many tokens are ignored.
            raw: the answer continues text instead of a conversation.
            blank_start: white space before a raw answer is none of it.
            metadata: the first line of the answer, if it was part of the prompt.
            end_after_call_of: names of tools; the answer ends when a segment begins after one whose first
                line is one of them, however few tokens it has.
            include_stop: keep the stop string at the end of the answer.
            show_special: special tokens appear as text.
            echoes: whether `echo` will be called.
        """
        self._tokenizer = tokenizer
        self._segment_roles = {} if raw or show_special else chat_format.segment_roles
        self._detokenizer = Detokenizer(tokenizer, continues=raw and not echoes, special=show_special)
        stops = tuple(stops)
        self._stops = StopStrings(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._looks_for_stops = bool(stops)
        self._blank = blank_start if raw else metadata is None
        self._stopped = False
        self._last_calls = frozenset(end_after_call_of)
        self._first_line = "" if metadata is None else metadata + "\n"
        self.tokens = 0

    def echo(self, ids: Iterable[int]) -> str:
        """Return the text of the prompt's `ids`, whose last character the answer may complete.

        Called at most once, before `push`.
        """
        text = "".join([self._detokenizer.push(token_id) for token_id in ids])
        self._detokenizer.continues()
        return text

    def push(self, token_id: int) -> AnswerDelta:
        """Take the next sampled token; ignored after the answer's end, since the engine runs ahead."""
        if self._stopped:
            return _NOTHING
        self.tokens += 1
        text = self._detokenizer.push(token_id)
        if self._last_calls and "\n" not in self._first_line:
            self._first_line += text
        if self._looks_for_stops:
            text, stop = self._match(text)
            if stop is not None:
                self._stopped = True
                return AnswerDelta(text, stopped=stop)
        role = self._segment_roles.get(token_id)
        if role is None:
            return AnswerDelta(text) if text else _NOTHING
        text += self._stops.finish()
        if self._first_line.partition("\n")[0].strip() in self._last_calls:
            self._stopped = True
            return AnswerDelta(text, ended=True)
        self._first_line = ""
        self._detokenizer = Detokenizer(self._tokenizer)
        self._blank = True
        return AnswerDelta(text, ((len(text), role),))

    def finish(self) -> AnswerDelta:
        """End the answer: return the text that was held back. An incomplete character at the end is lost."""
        return AnswerDelta(self._stops.finish())

    def _match(self, text: str) -> tuple[str, str | None]:
        answer = text.lstrip() if self._blank else text
        if answer:
            self._blank = False
        safe, stop = self._stops.push(answer, ignore=self.tokens < self._min_tokens)
        if stop is not None and self._include_stop:
            safe += stop
        return text[: len(text) - len(answer)] + safe, stop


class Detokenizer:
    """The text of one sequence of ids, one id at a time. Not thread-safe.

    A character may span several byte pieces, so its bytes are held back until it is complete: U+FFFD never
    stands for an incomplete character. Each byte that cannot be part of a character does become U+FFFD.
    Nothing is decoded twice.

    The joined results of `push` equal `Tokenizer.decode` of all ids, except for an incomplete character at
    the very end: it is dropped (divergence 4), while decoding all at once shows a U+FFFD for each byte.

    With `continues`, the ids continue other text, so a leading space is part of the text and is kept. With
    `special`, ids that are not text appear by name.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = utf8_decoder()
        self._bytes_waiting = False
        self._at_start = not continues

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that it completes, possibly none."""
        piece = self._tokenizer.piece(token_id)
        if self._special and not piece:
            piece, _ = self._tokenizer.display(token_id)
        if isinstance(piece, bytes):
            self._bytes_waiting = True
            return self._decode(piece, final=False)
        text = ""
        if self._bytes_waiting:  # a piece that is not a byte ends the character, complete or not
            self._bytes_waiting = False
            text = self._decode(b"", final=True)
        if self._at_start and piece:
            self._at_start = False
            piece = piece.removeprefix(" ")
        return text + piece

    def continues(self) -> None:
        """Keep a leading space from here on, even if there was no text so far."""
        self._at_start = False

    def _decode(self, utf8: bytes, *, final: bool) -> str:
        text = self._utf8.decode(utf8, final)
        if text:
            self._at_start = False
        return text


class _Matcher:
    """Matches one stop string: Knuth, Morris and Pratt's automaton, one step per character."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest prefix of `stop` with which the text so far ends."""
        self._fallback = [0] * len(stop)
        for index in range(1, len(stop)):
            self._fallback[index] = self._extend(self._fallback[index - 1], stop[index])

    def step(self, character: str) -> bool:
        """Take one character; true if the text now ends with the stop string, which may overlap the next."""
        self.matched = self._extend(self.matched, character)
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[-1]
        return True

    def _extend(self, length: int, character: str) -> int:
        while length and self.stop[length] != character:
            length = self._fallback[length - 1]
        return length + 1 if self.stop[length] == character else 0


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and never returns a part of it.

    The text ends at the first character that completes a stop string, and is cut where that stop string
    begins, as if the model wrote character by character. If one character completes several, the longest
    counts; of equal ones, the first in the list. So the result does not depend on how the text is cut into
    pieces, and text is held back no longer than necessary.

    The text is read once, at constant average cost per character and stop string. Not thread-safe.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Prepare to match `stops`, none of which is empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""

    def push(self, text: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Return the text that cannot be part of a stop string, and the stop string if one was found.

        The longest suffix that may still become a stop string is held back. After a match, matching starts
        over. With `ignore`, those that end in `text` are text like any other.
        """
        if not self._matchers:
            return text, None
        for index, character in enumerate(text):
            completed = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if completed and not ignore:
                stop = max(completed, key=len)
                before = self.finish() + text[: index + 1]
                return before[: len(before) - len(stop)], stop
        text = self._held + text
        safe = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[safe:]
        return text[:safe], None

    def finish(self) -> str:
        """Return what was held back, since it did not become a stop string. Matching starts over."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return held
