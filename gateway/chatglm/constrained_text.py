"""The text of an answer that is either tool calls or text that follows a grammar: shown unchanged."""

import enum
from collections.abc import Sequence

from gateway.chatglm.answer_text import by_segment
from wire.meta import Segment


class _At(enum.Enum):
    """The current position within a segment."""

    FIRST_LINE = enum.auto()
    TEXT = enum.auto()
    BROKEN_CALL = enum.auto()
    """After a first line that is not empty: the beginning of a call that was cut short."""


class ConstrainedText:
    """Selects the text to be shown of segments that are not calls. Not thread-safe.

    Text that follows a grammar is shown unchanged, white space included. Nothing else is shown: the beginning
    of a call that was cut short would violate the schema, and is left out.
    """

    def __init__(self) -> None:
        self._begin_segment()

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the raw answer and the segments that begin in it; return what may be shown.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        shown = []
        for segment, part in by_segment(text, segments):
            if segment is not None:
                self._begin_segment()
            shown.append(self._push_within_segment(part))
        return "".join(shown)

    def finish(self) -> str:
        """Return what was held back: nothing."""
        return ""

    def _begin_segment(self) -> None:
        self._at = _At.FIRST_LINE
        self._first_line = ""

    def _push_within_segment(self, text: str) -> str:
        if self._at is _At.FIRST_LINE:
            line, newline, text = text.partition("\n")
            self._first_line += line
            if newline:
                self._at = _At.BROKEN_CALL if self._first_line.strip() else _At.TEXT
        return text if self._at is _At.TEXT else ""
