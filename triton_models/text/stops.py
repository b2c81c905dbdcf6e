"""Finds stop strings in a stream of text."""

from collections.abc import Iterable


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
        """Take one character; true if the text now ends with the whole stop string."""
        self.matched = self._extend(self.matched, character)
        return self.matched == len(self.stop)

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
        """Prepare to match `stops`.

        Raises:
            ValueError: one of them is empty.
        """
        self._matchers = [_Matcher(stop) for stop in stops]
        if any(not matcher.stop for matcher in self._matchers):
            raise ValueError("a stop string must not be empty")
        self._held = ""

    @property
    def any(self) -> bool:
        """Whether there are any stop strings; without them, text is passed on unchanged."""
        return bool(self._matchers)

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that cannot be part of a stop string, and the stop string if one was found.

        The longest suffix that may still become a stop string is held back. After a match, matching starts
        over.
        """
        if not self._matchers:
            return text, None
        for index, character in enumerate(text):
            completed = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if completed:
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
