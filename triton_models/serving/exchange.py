"""One request to entry `M`, from its arrival to its one response."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triton_models.serving.client_history import ClientHistory
from wire.refusal import RefusalCode


@dataclass(frozen=True, slots=True)
class FieldAnswer:
    """The answer to one row of a request."""

    response: str
    history: ClientHistory
    """The conversation with the new round."""


class FieldResponder(Protocol):
    """Sends a request's one response. Used by one thread at a time, and never after the response."""

    def send(self, answers: Sequence[FieldAnswer]) -> None:
        """Send one answer for each row."""

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error."""

    def cancelled(self) -> bool:
        """Return True once the client cancelled or went away."""


class Exchange:
    """Collects the answers to a request's rows, and answers once: with all of them, or with the first error.

    The responder is used only under the lock: asking Triton whether a request that was already answered is
    cancelled crashes the whole server.
    """

    def __init__(self, responder: FieldResponder, rows: int) -> None:
        self._responder = responder
        self._lock = threading.Lock()
        self._answers: list[FieldAnswer | None] = [None] * rows
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the request was answered."""
        return self._closed

    def answer(self, row: int, answer: FieldAnswer) -> None:
        """Store the answer to a row; the last missing one sends them all."""
        with self._lock:
            self._answers[row] = answer
            answers = [each for each in self._answers if each is not None]
            if self._closed or len(answers) < len(self._answers):
                return
            self._responder.send(answers)
            self._closed = True

    def refuse(self, code: RefusalCode, message: str, *, row: int | None = None) -> None:
        """Answer with an error, unless already answered; if there are several rows, it names the row."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            several = row is not None and len(self._answers) > 1
            self._responder.refuse(code, f"row {row}: {message}" if several else message)

    def client_gone(self) -> bool:
        """Return True if the client cancelled or hung up before the request was answered."""
        with self._lock:
            return not self._closed and self._responder.cancelled()
