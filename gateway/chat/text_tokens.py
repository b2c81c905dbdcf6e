"""Lists the tokens of an answer's text: what they add to it, joined, is the text that the client gets.

The readers of answers know nothing of tokens. A token's characters are found in the raw answer, and the raw
answer's in the text that was made of it: that leaves out white space, reasoning, calls and stop strings. A
token of which only a part is in the text is listed by its whole name, with the bytes of that part. Tokens
that are not text, such as those that open a segment or end the answer, are not listed.
"""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from gateway.chat.answers import PLACEHOLDER, TRAINING_DATE
from gateway.core.events import TokenLogprob

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")

_NEAR = 64
"""So many characters may stand in a backend's text before a token that has none of them."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A token that may be listed."""

    token: TokenLogprob
    left: int
    """How much of it is not decided: bytes; 1 if it has none."""
    added: bytes = b""
    """What it adds to the text."""
    shown: bool = False
    """Whether part of it is in the text."""

    def result(self) -> TokenLogprob:
        return self.token if self.added == self.token.utf8 else replace(self.token, utf8=self.added)


@dataclass(slots=True, eq=False)
class _Part:
    """What a token has of some characters."""

    entry: _Entry
    size: int
    utf8: bytes


_Run = tuple[str, list[_Part]]
"""All characters of one token; or one character, and what each token has of it that has part of it. No token
has one that only the backend knows."""


class EveryToken:
    """Lists all tokens as they come, with the interface of `TextTokens`: of an answer that continues a text.

    Who scores texts counts them.
    """

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []

    def push(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> None:  # noqa: ARG002 - the interface
        """See `TextTokens.push`."""
        self._tokens += tokens

    def take(self, *_: object, **__: object) -> tuple[TokenLogprob, ...]:
        """See `TextTokens.take`."""
        taken = tuple(self._tokens)
        self._tokens.clear()
        return taken

    def finish(self) -> tuple[TokenLogprob, ...]:
        """See `TextTokens.finish`."""
        return self.take()


class TextTokens:
    """Lists the tokens of one choice's text. Not thread-safe.

    Tokens come with their part of the raw answer or before it.

    Args:
        special: tokens that are not text appear in it by name.
    """

    def __init__(self, *, special: bool = False) -> None:
        self._special = special
        self._entries: deque[_Entry] = deque()
        """Those that are not decided, in order."""
        # Each byte that is not part of a character is one, as it is in the raw answer.
        self._utf8 = _new_utf8_decoder("surrogateescape")
        self._bytes: deque[tuple[_Entry, int]] = deque()
        """Of a character that is not complete, and whose they are."""
        self._nameless: list[_Entry] = []
        """Tokens of the next character, of which only the last shows anything."""
        self._sampled: deque[_Run] = deque()
        """What tokens have that the raw answer has not come to."""
        self._raw: deque[_Run] = deque()
        """Characters of the raw answer of which nothing is known yet."""
        self._at = 0
        """The place of the first of them."""
        self._before = ""
        """What the text has before the next token: the separator of segments."""

    def push(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> None:
        """Take more of the raw answer and its next tokens."""
        for token in tokens:
            utf8 = token.utf8 or (token.token.encode() if self._special else b"")
            if utf8 or not token.token.strip("\ufffd"):
                entry = _Entry(token, len(utf8) or 1)
                self._entries.append(entry)
                self._sample(entry, utf8)
            else:
                self._complete(self._utf8.decode(b"", final=True))  # It ends a character, complete or not.
        place = 0
        while place < len(text):
            self._raw.append(self._next(text, place))
            place += len(self._raw[-1][0])

    def take(
        self, text: str, hidden: list[tuple[int, int]], *, called: bool = False
    ) -> tuple[TokenLogprob, ...]:
        """Return the tokens that are decided with more of the answer's text.

        Args:
            text: the next of it.
            hidden: where in the raw answer no text is, in order; those that were passed are removed.
            called: a call comes next, which is the next in `hidden`.
        """
        place = 0
        while place < len(text):
            self._pass(hidden)
            written = self._raw[0][0] if self._raw else ""
            whole = not hidden or self._at + len(written) <= hidden[0][0]
            if written and whole and text.startswith(written, place):
                self._show()
                place += len(written)
            elif len(written) > 1:
                _split(self._raw)
            elif written.isspace():
                self._drop()
            elif text.startswith(TRAINING_DATE, place) and self._placeholder_is_next():
                self._show_date()
                place += len(TRAINING_DATE)
            else:
                self._before += text[place]
                place += 1
        if called and hidden:
            self._drop_blank(hidden[0][0])
        self._pass(hidden)
        return tuple(self._decided())

    def finish(self) -> tuple[TokenLogprob, ...]:
        """The answer is over: return the token whose text it ends within, if there is one."""
        return tuple(entry.result() for entry in self._entries if entry.shown)

    def _sample(self, entry: _Entry, utf8: bytes) -> None:
        if not utf8:
            self._nameless.append(entry)
            return
        characters = self._utf8.decode(utf8)
        if not (self._bytes or self._nameless) and characters.encode(errors="surrogatepass") == utf8:
            self._sampled.append((characters, [_Part(entry, len(utf8), utf8)]))  # the common case
            return
        self._bytes.extend((entry, byte) for byte in utf8)
        self._complete(characters)

    def _complete(self, characters: str) -> None:
        """Note characters, which the first of the bytes are."""
        for each in characters:
            invalid = "\udc80" <= each <= "\udcff"
            parts = self._take_nameless()
            for entry, byte in [self._bytes.popleft() for _ in range(1 if invalid else len(each.encode()))]:
                if parts and parts[-1].entry is entry:
                    parts[-1].size += 1
                    parts[-1].utf8 += bytes([byte])
                else:
                    parts.append(_Part(entry, 1, bytes([byte])))
            self._sampled.append(("\ufffd" if invalid else each, parts))

    def _take_nameless(self) -> list[_Part]:
        nameless, self._nameless = self._nameless, []
        return [_Part(entry, 1, b"") for entry in nameless]

    def _next(self, text: str, place: int) -> _Run:
        """Return what the raw answer has at `place` of its new text, a character or a whole token.

        Our own models' tokens differ from it by a space that begins a segment and is dropped. Other backends
        may leave a space out of a token's text, or a token out of their text.
        """
        while self._sampled:
            written, _ = self._sampled[0]
            if text.startswith(written, place):
                return self._sampled.popleft()
            if len(written) > 1:
                _split(self._sampled)
                continue
            if written != " ":
                word = self._word()
                if text[place].isspace() or text.find(word, place, place + len(word) + _NEAR) >= 0:
                    break
                for _ in word[1:]:
                    _forget(self._sampled.popleft()[1])
            _forget(self._sampled.popleft()[1])
        parts = self._take_nameless()
        if parts:
            parts[-1].utf8 = text[place].encode()
        return text[place], parts

    def _word(self) -> str:
        """Return the characters of the first of the sampled tokens, which is split."""
        last = self._sampled[0][1][-1].entry
        others = takewhile(lambda run: run[1][0].entry is last, islice(self._sampled, 1, None))
        return self._sampled[0][0] + "".join(character for character, _ in others)

    def _pass(self, hidden: list[tuple[int, int]]) -> None:
        """Drop what is hidden, as far as nothing else comes first."""
        while hidden and self._at >= hidden[0][0]:
            left = hidden[0][1] - self._at
            if left <= 0:
                hidden.pop(0)
            elif not self._raw:
                return
            elif len(self._raw[0][0]) > left:
                _split(self._raw)
            else:
                self._drop()

    def _drop_blank(self, end: int) -> None:
        """Drop what stands before `end`, if it is white space."""
        between, gap = "", end - self._at
        for written, _ in self._raw:
            if len(between) >= gap:
                break
            between += written
        if between[: max(0, gap)].isspace():
            while self._at < end:
                _split(self._raw)
                self._drop()

    def _drop(self) -> None:
        written, parts = self._raw.popleft()
        self._at += len(written)
        _forget(parts)

    def _show(self, instead: str | None = None) -> None:
        """Note that the text has what is next, or something instead of it."""
        written, parts = self._raw.popleft()
        self._at += len(written)
        if instead is not None:
            for number, part in enumerate(parts):
                part.utf8 = b"" if number else instead.encode()
        if parts:
            parts[0].utf8 = self._before.encode() + parts[0].utf8
            self._before = ""
        else:
            self._before += written if instead is None else instead
        for part in parts:
            part.entry.added += part.utf8
            part.entry.shown = True
        _forget(parts)

    def _show_date(self) -> None:
        for number in range(len(PLACEHOLDER)):
            _split(self._raw)
            self._show("" if number else TRAINING_DATE)

    def _placeholder_is_next(self) -> bool:
        runs = islice(self._raw, len(PLACEHOLDER))
        return "".join([written for written, _ in runs]).startswith(PLACEHOLDER)

    def _decided(self) -> Iterator[TokenLogprob]:
        while self._entries and not self._entries[0].left:
            entry = self._entries.popleft()
            if entry.shown:
                yield entry.result()


def _forget(parts: list[_Part]) -> None:
    """Note that the parts are decided."""
    for part in parts:
        part.entry.left -= part.size


def _split(runs: deque[_Run]) -> None:
    """Divide the first of `runs` into its characters."""
    written, parts = runs.popleft()
    if len(written) > 1:
        (whole,) = parts
        characters = [(each, each.encode()) for each in written]
        runs.extendleft((each, [_Part(whole.entry, len(utf8), utf8)]) for each, utf8 in reversed(characters))
    else:
        runs.appendleft((written, parts))
