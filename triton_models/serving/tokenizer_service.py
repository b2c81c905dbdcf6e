"""The tokenizer entry without Triton's interface: a bounded queue, and one thread that answers in order.

The queue is the entry's own because Triton forgets requests in any queue that it bounds (ARCHITECTURE.md,
"Requests that Triton forgets"). `handle` never waits, so Triton's own queue in front of it stays empty.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from triton_models.errors import ModelError
from triton_models.serving.chat_text import ChatText
from triton_models.serving.tokenizing import Tokenized, tokenize
from wire.refusal import RefusalCode
from wire.tokenizing import decode_tokenizing

log = logging.getLogger(__name__)

MAX_WAITING: Final = 64
"""Requests that may wait. One is handled at a time, so the wait is at most about a second, unless texts are
very long."""

LONGEST_WAIT_S: Final = 60.0
"""How long a request may wait, unless its own time is shorter."""

ASK_AFTER_S: Final = 0.01
"""Whether a request was cancelled is asked only if it waited longer. Asking takes some 50 microseconds, in
which the death of this process would take the server along (divergence 16)."""


class TokenizerResponder(Protocol):
    """Sends a request's one response. Used by one thread at a time, and never after the response."""

    def send(self, done: Tokenized) -> None:
        """Send the result."""

    def refuse(self, code: RefusalCode, message: str) -> None:
        """Send an error. Never raises."""

    def cancelled(self) -> bool:
        """Return True once the client cancelled or went away."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    responder: TokenizerResponder
    document: bytes
    since: float
    """In monotonic seconds."""
    longest_s: float


class TokenizerService:
    """Tokenises, renders and decodes with the text side of one model.

    Args:
        text: the model's tokenizer and chat format.
        vocabulary: number of ids that the model has.
        max_waiting: requests that may wait; more are refused at once.
    """

    def __init__(self, text: ChatText, vocabulary: int, *, max_waiting: int = MAX_WAITING) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self._max_waiting = max_waiting
        self._waiting: queue.Queue[_Waiting | None] = queue.Queue()
        """Ends with None."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Held while the queue grows, so that nothing comes after its end."""
        self._thread = threading.Thread(target=self._serve, name="tokenizer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Refuse all requests from now on, including those that wait, and join the thread."""
        with self._lock:
            self._closing.set()
            self._waiting.put(None)
        self._thread.join()

    def handle(self, responder: TokenizerResponder, document: bytes, wait_s: float = LONGEST_WAIT_S) -> None:
        """Accept a request; its response follows from another thread, or at once if it is refused.

        Args:
            responder: for the response.
            document: the tensor `request`, see `wire.tokenizing`.
            wait_s: how long it may wait for its turn, in seconds; LONGEST_WAIT_S at most.
        """
        waiting = _Waiting(responder, document, time.monotonic(), min(wait_s, LONGEST_WAIT_S))
        with self._lock:
            count = self._waiting.qsize()
            closing = self._closing.is_set()
            if not closing and count < self._max_waiting:
                self._waiting.put(waiting)
                return
        if closing:
            responder.refuse(RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
        else:
            # The first words are those of Triton's own full queues, which clients may look for.
            responder.refuse(RefusalCode.QUEUE_FULL, f"Exceeds maximum queue size: {count} requests wait")

    def _serve(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            try:
                self._answer(waiting)
            except Exception:
                # The boundary of one request: its error must not end the thread that serves all.
                log.exception("a request to the tokenizer failed")
                waiting.responder.refuse(RefusalCode.INTERNAL, "the request failed")

    def _answer(self, waiting: _Waiting) -> None:
        responder = waiting.responder
        waited_s = time.monotonic() - waiting.since
        if self._closing.is_set():
            responder.refuse(RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
        elif waited_s > waiting.longest_s:
            responder.refuse(RefusalCode.DEADLINE_EXCEEDED, "Request timeout expired in the queue")
        elif waited_s > ASK_AFTER_S and responder.cancelled():
            responder.refuse(RefusalCode.CANCELLED, "the request was cancelled")
        else:
            try:
                done = tokenize(self._text, decode_tokenizing(waiting.document), self._vocabulary)
            except (ModelError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                responder.refuse(RefusalCode.INVALID_REQUEST, str(error))
            else:
                responder.send(done)
