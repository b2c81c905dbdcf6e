"""Turns a raw ChatGLM answer into the text that a client sees.

Clients of OpenAI's API and legacy clients of the KServe door are shown the same text (divergences 6 and 9 in
ARCHITECTURE.md).

The answer consists of one or more segments; a role token opens each further segment, and the wire reports it
separately from the text. If no tools are offered, everything is text. A segment's first line, where ChatGLM3
writes a tool's name, is then usually empty; if it is not, it stays in the text, so that nothing is lost. As
in the models' own code, white space around a segment is stripped and the placeholder for the training date is
replaced (`process_response` of the published `modeling_chatglm.py`). Segments are joined by newlines; blank
ones add nothing.

The result does not depend on how the answer was cut into deltas. Text that may turn out to be trailing white
space or the placeholder is held back; everything else is passed on at once.
"""

from collections.abc import Iterator, Sequence

from wire.meta import Segment

_PLACEHOLDER = "[[训练时间]]"
_TRAINING_DATE = "2023年"
_SEPARATOR = "\n"


def by_segment(text: str, segments: Sequence[Segment]) -> Iterator[tuple[Segment | None, str]]:
    """Split one delta of a raw answer: yield each segment that begins in it with its part of `text`.

    The first item is None with the part that continues the segment that was open before; it may be empty.

    Raises:
        ValueError: a segment begins outside `text`, or before the one ahead of it.
    """
    opened: Segment | None = None
    start = 0
    for segment in segments:
        if not start <= segment.at <= len(text):
            raise ValueError("a segment begins outside the text")
        yield opened, text[start : segment.at]
        opened, start = segment, segment.at
    yield opened, text[start:]


class AnswerText:
    """The text of one answer (one choice), from its first delta to its last. Not thread-safe."""

    def __init__(self) -> None:
        self._held = ""
        self._any_text = False
        self._segment_has_text = False

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the raw answer and the segments that begin in it; return what may be shown.

        Raises:
            ValueError: a segment begins outside `text`, or before the one ahead of it.
        """
        if not (segments or self._held or not self._segment_has_text or "[" in text or text[-1:].isspace()):
            return text  # the common case: nothing to strip, fill in or wait for
        shown = []
        for segment, part in by_segment(text, segments):
            if segment is not None:
                shown.append(self._end_segment())
            shown.append(self._push_within_segment(part))
        return "".join(shown)

    def finish(self) -> str:
        """Return what was held back and turned out to be text; the answer is over."""
        return self._end_segment()

    def _push_within_segment(self, text: str) -> str:
        text = (self._held + text).replace(_PLACEHOLDER, _TRAINING_DATE)
        if not self._segment_has_text:
            text = text.lstrip()
        safe = len(text) - _placeholder_begun(text)
        if safe == len(text):
            safe = len(text.rstrip())
        self._held = text[safe:]
        return self._show(text[:safe])

    def _end_segment(self) -> str:
        shown = self._show(self._held.rstrip())
        self._held = ""
        self._segment_has_text = False
        return shown

    def _show(self, text: str) -> str:
        if not text:
            return ""
        opens_later_segment = self._any_text and not self._segment_has_text
        self._any_text = self._segment_has_text = True
        return _SEPARATOR + text if opens_later_segment else text


class ContinuedText:
    """The text of an answer that is raw or constrained by a grammar: shown exactly as the model wrote it."""

    def push(self, text: str, segments: Sequence[Segment] = ()) -> str:
        """Take one delta of the answer; return what may be shown, which is all of it.

        Raises:
            ValueError: a segment begins in it, which cannot happen in such an answer.
        """
        if segments:
            raise ValueError("a segment in a raw answer")
        return text

    def finish(self) -> str:
        """Return what was held back: nothing."""
        return ""


def _placeholder_begun(text: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the placeholder."""
    return next(
        (length for length in range(len(_PLACEHOLDER) - 1, 0, -1) if text.endswith(_PLACEHOLDER[:length])), 0
    )
