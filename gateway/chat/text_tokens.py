"""Lists the tokens of an answer's text: their bytes, joined, are the text that the client gets.

The readers of answers know nothing of tokens. Both are measured in bytes of the raw answer: each byte is some
token's, and the text leaves some out, of white space, reasoning, calls and stop strings. A token of which
only a part is in the text is listed by its whole name, with the bytes of that part. Tokens that are not text,
such as those that open a segment or end the answer, are not listed.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from gateway.chat.answers import PLACEHOLDER, TRAINING_DATE, in_runs
from gateway.core.events import Piece, TokenLogprob, text_in

_REPLACEMENT = "\ufffd".encode()

_NEAR = 64
"""So many bytes may stand in a backend's text before a token that has none of them."""
_STEP = 1024
"""So many characters are compared at once, so that the time grows with the text alone."""

Run = tuple[tuple[Piece, ...], tuple[TokenLogprob, ...]]
"""Pieces, of which the calls come last, and the tokens of their text."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A token that may be listed; None: a part of the raw answer that is no token's."""

    token: TokenLogprob | None
    coming: bytes = b""
    """Its bytes that the raw answer has not come to."""
    nameless: bool = False
    """Whether its bytes are not known."""
    left: int = 0
    """How many bytes of the raw answer are its, and may be in the text or not."""
    added: bytes = b""
    """What it adds to the text."""
    shown: bool = False
    """Whether part of it is in the text."""


class TextTokens:
    """Lists the tokens of one choice's text. Not thread-safe.

    Tokens come with their part of the raw answer or before it. `special`: those that are no text appear in it
    by name.
    """

    def __init__(self, *, special: bool = False) -> None:
        self._special = special
        self._entries: deque[_Entry] = deque()
        """Those that are not decided, in order."""
        self._coming: deque[_Entry] = deque()
        """The last of them, which the raw answer has not come to the end of."""
        self._nameless: list[TokenLogprob] = []
        """Those that are listed if the next token is."""
        self._listed: list[TokenLogprob] = []
        self._raw = ""
        """The raw answer from `_begun` on."""
        self._begun = 0
        self._at = 0
        """The place in it before which all is decided."""
        self._before = b""
        """What the text has before the next token: the separator of segments."""

    def push(self, text: str, tokens: Iterable[TokenLogprob] = ()) -> None:
        """Take more of the raw answer and its next tokens."""
        for token in tokens:
            utf8 = token.utf8 or (token.token.encode() if self._special else b"")
            if utf8 or not token.token.strip("\ufffd"):
                entry = _Entry(token, utf8, nameless=not utf8)
                self._entries.append(entry)
                self._coming.append(entry)
        self._raw += text
        self._share(text.encode())

    def take(
        self, pieces: Iterable[Piece], hidden: list[tuple[int, int]], *, over: bool = False
    ) -> list[Run]:
        """Divide the answer's next pieces into runs, with the tokens that are decided now.

        Args:
            pieces: all that is made of the raw answer so far.
            hidden: where in it no text is, in order; those that were passed are removed.
            over: the answer is over, perhaps within a token.
        """
        runs = [(run, self._tokens(text_in(run), hidden)) for run in in_runs(pieces)]
        if over:
            last, tokens = runs[-1]
            rest = [_result(each.token, each.added) for each in self._entries if each.token and each.shown]
            runs[-1] = last, (*tokens, *rest)
        return runs

    def _share(self, raw: bytes) -> None:
        """Share out more of the raw answer among the tokens."""
        place = shared = 0
        nameless: _Entry | None = None
        """The last token whose bytes are not known: it has what stands before the next one's."""
        while place < len(raw) and self._coming:
            entry = self._coming[0]
            if nameless is None and _REPLACEMENT in raw[place : place + len(entry.coming) + 2]:
                entry.coming = _as_written(entry.coming, self._behind(), raw, place)
            here = raw[place : place + len(entry.coming)]
            if not entry.coming.startswith(here):
                after_nameless = nameless is not None
                place = _mend(entry, self._behind(), raw, place, behind_nameless=after_nameless)
                continue
            if here:
                (nameless or entry).left += place - shared
                entry.left += len(here)
                entry.coming = entry.coming[len(here) :]
                place = shared = place + len(here)
                nameless = None
            if not entry.coming:
                self._coming.popleft()
                nameless = entry if entry.nameless else nameless
        if shared < len(raw):
            if not self._entries:
                self._entries.append(_Entry(None))
            owner = nameless or (self._coming[0] if self._coming else self._entries[-1])
            owner.left += len(raw) - shared

    def _behind(self) -> bytes:
        """Return the next bytes behind those of the first token that is coming."""
        return b"".join(each.coming for each in islice(self._coming, 1, len(_REPLACEMENT)))

    def _tokens(self, text: str, hidden: list[tuple[int, int]]) -> tuple[TokenLogprob, ...]:
        """Return the tokens that are decided with more of the answer's text."""
        place = 0
        while place < len(text):
            self._pass(hidden)
            raw = self._next(hidden)
            size = min(len(raw), len(text) - place)
            while raw[:size] != text[place : place + size]:
                size //= 2
            if size:
                self._decide(raw[:size], raw[:size])
                place += size
            elif raw[:1].isspace():
                blank = raw[: len(raw) - len(raw.lstrip())]
                self._decide(blank.partition(text[place])[0])
            elif raw.startswith(PLACEHOLDER) and text.startswith(TRAINING_DATE, place):
                self._decide(PLACEHOLDER, TRAINING_DATE)
                place += len(TRAINING_DATE)
            else:
                self._before += text[place].encode()
                place += 1
        while hidden and (blank := self._next(hidden)).isspace():
            self._decide(blank)
        self._pass(hidden)
        self._settle()
        self._raw, self._begun = self._raw[self._at - self._begun :], self._at
        tokens = tuple(self._listed)
        self._listed.clear()
        return tokens

    def _next(self, hidden: list[tuple[int, int]]) -> str:
        """Return more of the raw answer, up to what is hidden."""
        end = self._at + _STEP
        if hidden:
            end = min(end, hidden[0][0])
        return self._raw[self._at - self._begun : max(0, end - self._begun)]

    def _pass(self, hidden: list[tuple[int, int]]) -> None:
        """Leave out what is hidden, as far as nothing else comes first."""
        while hidden and self._at >= hidden[0][0]:
            self._decide(self._raw[self._at - self._begun : max(0, hidden[0][1] - self._begun)])
            if self._at < hidden[0][1]:
                return
            hidden.pop(0)

    def _decide(self, raw: str, shown: str | None = None) -> None:
        """Note that the text has `shown` for the next of the raw answer; None: it leaves it out."""
        self._at += len(raw)
        utf8 = (raw if shown is None else shown).encode()
        place, end = 0, len(utf8 if shown == raw else raw.encode())
        while place < end:
            entry = self._entries[0]
            if not entry.left:
                self._settle()
                continue
            size = min(entry.left, end - place)
            entry.left -= size
            if shown is not None:
                added = self._before + utf8[place : place + size]
                entry.shown = entry.token is not None
                self._before = b"" if entry.shown else added
                entry.added += added
            place += size

    def _settle(self) -> None:
        """List the tokens of which all is decided."""
        entries, coming = self._entries, self._coming
        while entries and not (entries[0].left or (coming and coming[0] is entries[0])):
            entry = entries.popleft()
            if entry.token is not None:
                if entry.shown:
                    self._listed += [*self._nameless, _result(entry.token, entry.added)]
                if entry.nameless and not entry.shown:
                    self._nameless.append(entry.token)
                else:
                    self._nameless.clear()


def _result(token: TokenLogprob, utf8: bytes) -> TokenLogprob:
    return token if token.utf8 == utf8 else replace(token, utf8=utf8)


def _mend(entry: _Entry, behind: bytes, raw: bytes, place: int, *, behind_nameless: bool) -> int:
    """Reconcile a token with a raw answer that goes on otherwise; return where in it to go on.

    Our own models' tokens differ from it by a space that begins a segment and is dropped, and by bytes that
    are part of no character. Other backends may leave a space out of a token, or a token out of their text;
    and tokens without a name have something before the next one.
    """
    coming = entry.coming
    at = raw.find(coming, place, place + len(coming) + _NEAR)
    if behind_nameless and at >= 0:
        return at
    if coming.startswith(b" "):
        entry.coming = coming[1:]
    elif (written := _as_written(coming, behind, raw, place)) != coming:
        entry.coming = written
    elif at >= 0:
        return at
    elif raw[place : place + 1].isspace():
        return place + 1
    else:
        entry.coming = b""
    return place


def _as_written(utf8: bytes, behind: bytes, raw: bytes, place: int) -> bytes:
    """Return a token's bytes with U+FFFD for each of them that the raw answer has that for.

    The first byte of U+FFFD may be such a byte itself: what comes `behind` it tells.
    """
    all_bytes, written = utf8 + behind, bytearray()
    for index, byte in enumerate(utf8):
        text = chr(byte).isascii() or _REPLACEMENT.startswith(all_bytes[index : index + len(_REPLACEMENT)])
        invalid = raw.startswith(_REPLACEMENT, place + len(written)) and not text
        written += _REPLACEMENT if invalid else bytes([byte])
    return bytes(written)
