"""A line of progress on standard error: rewritten on a terminal, repeated now and then elsewhere."""

import shutil
import sys
import time
from typing import Final, Self

_REWRITE_S: Final = 0.2
_REPEAT_S: Final = 10.0


class Progress:
    """Shows a line that changes, as a context at whose end the last one stays. For one thread."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self._shown_at = time.monotonic()
        self._text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            self._write(self._text, end="\n")

    def show(self, text: str) -> None:
        """Have `text` be the line; it is written if the last one has been there for long enough."""
        self._text = text
        now = time.monotonic()
        if now - self._shown_at >= (_REWRITE_S if self._rewrites else _REPEAT_S):
            self._shown_at = now
            if self._rewrites:
                self._write(text[: shutil.get_terminal_size().columns - 1], end="")
            else:
                self._write(text, end="\n")

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._write(line, end="\n")

    def _write(self, text: str, end: str) -> None:
        sys.stderr.write(("\r\x1b[K" if self._rewrites else "") + text + end)
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return seconds as people write them: `5 s`, `2:05`, `1:00:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
