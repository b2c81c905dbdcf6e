"""Entry `M` without Triton's interface: reads requests, forwards them to `M-stream`, answers, cancels.

There is one thread per row, which mostly waits for `M-stream` and costs little. One monitor thread watches
all of them.
"""

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Final

from triton_models.errors import ClientInputError, StreamRefusedError
from triton_models.serving.contracts import Ask, Row, read_ask
from triton_models.serving.exchange import Exchange, FieldAnswer, FieldResponder
from triton_models.serving.inner import StreamCaller
from triton_models.serving.process import is_running
from triton_models.serving.reply import Reply, read_reply
from triton_models.signatures import Contract
from wire.history import Turn
from wire.meta import Segment
from wire.refusal import RefusalCode
from wire.sampling import Generation

log = logging.getLogger(__name__)

MAX_OPEN: Final = 1024
"""Most rows in progress at once; each has a thread."""

MONITOR_INTERVAL_S: Final = 0.2

ACCEPT_TIMEOUT_S: Final = 15.0
"""Seconds after it was asked; an `M-stream` that has not accepted the row by then counts as dead or stuck."""

TOP_P: Final = 0.8
"""The default of the original `chat`; clients of entry `M` have never been able to change it."""


class _Call:
    """One row in progress."""

    def __init__(self, exchange: Exchange, row: int) -> None:
        self.id = uuid.uuid4().hex
        self.exchange = exchange
        self.row = row
        self.asked: float | None = None
        """When `M-stream` was asked, in monotonic seconds; None: not yet."""
        self.process: str | None = None
        """The process of `M-stream` that has accepted the row; None: none has yet."""
        self.cancelling = False


class FieldService:
    """Serves the clients of one contract over one stream entry; `handle` never waits."""

    def __init__(
        self,
        contract: Contract,
        chat_format: str,
        caller: StreamCaller,
        *,
        accept_timeout_s: float = ACCEPT_TIMEOUT_S,
        max_open: int = MAX_OPEN,
    ) -> None:
        self._contract = contract
        self._chat_format = chat_format
        self._caller = caller
        self._accept_timeout_s = accept_timeout_s
        self._max_open = max_open
        self._calls: dict[str, _Call] = {}
        self._gone: set[str] = set()
        self._closing = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="field-monitor", daemon=True)

    def start(self) -> None:
        """Start the monitor."""
        self._monitor.start()

    def close(self) -> None:
        """Refuse all requests from now on, including those in progress, and join the monitor."""
        self._closing.set()
        self._monitor.join()
        for call in list(self._calls.values()):
            call.exchange.refuse(RefusalCode.SHUTTING_DOWN, "the model is being unloaded")

    def handle(self, responder: FieldResponder, rows: Sequence[Row]) -> None:
        """Accept a request of one or more rows; its one response follows from another thread."""
        exchange = Exchange(responder, len(rows))
        if self._closing.is_set():
            exchange.refuse(RefusalCode.SHUTTING_DOWN, "the model is being unloaded")
            return
        if len(self._calls) + len(rows) > self._max_open:
            exchange.refuse(RefusalCode.QUEUE_FULL, f"{len(self._calls)} requests are open already")
            return
        for number, row in enumerate(rows):
            call = _Call(exchange, number)
            self._calls[call.id] = call
            threading.Thread(target=self._serve, args=(call, row), name=f"row-{call.id}", daemon=True).start()

    def _serve(self, call: _Call, row: Row) -> None:
        try:
            call.exchange.answer(call.row, self._answer(call, row))
        except ClientInputError as error:
            call.exchange.refuse(RefusalCode.INVALID_REQUEST, str(error), row=call.row)
        except StreamRefusedError as error:
            call.exchange.refuse(RefusalCode(error.code), error.message, row=call.row)
        except Exception:
            # The outermost frame of this thread: the client must get an answer.
            log.exception("a request failed")
            call.exchange.refuse(RefusalCode.INTERNAL, "the request failed", row=call.row)
        finally:
            self._calls.pop(call.id, None)

    def _answer(self, call: _Call, row: Row) -> FieldAnswer:
        ask = read_ask(self._contract, row, self._chat_format)
        reply = self._converse(call, ask)
        return FieldAnswer(reply.response, ask.history.extended(Turn("user", ask.prompt), reply.turns))

    def _converse(self, call: _Call, ask: Ask) -> Reply:
        turns = ask.history.turns
        generation = Generation(
            request_id=call.id,
            temperature=ask.temperature,
            top_p=TOP_P,
            max_total_tokens=ask.max_total_tokens,
            stream=False,
            quiet=True,
        )
        call.asked = time.monotonic()
        text = ""
        segments: list[Segment] = []
        finished = False
        for delta, meta in self._caller.generate(ask.prompt, turns, generation):
            if meta.accepted is not None:
                call.process = meta.accepted.process
            segments += [Segment(len(text) + each.at, each.role) for each in meta.segments or ()]
            text += delta
            finished = finished or meta.finish_reason is not None
        if not finished:
            raise StreamRefusedError(RefusalCode.UNAVAILABLE, "the answer ended before it was complete")
        return read_reply(text, segments, turns, self._chat_format)

    def _watch(self) -> None:
        while not self._closing.wait(MONITOR_INTERVAL_S):
            self._caller.give_up(self._accept_timeout_s)
            calls = list(self._calls.values())
            gone = self._find_gone({call.process for call in calls if call.process is not None})
            for call in calls:
                try:
                    self._look(call, gone)
                except Exception:
                    # The boundary of one request on this thread: the others must still be watched.
                    log.exception("could not watch a request")

    def _find_gone(self, processes: set[str]) -> set[str]:
        """Return which of them were gone the last time, too: their last answers have arrived by now."""
        gone = {process for process in processes if not is_running(process)}
        before, self._gone = self._gone, gone
        return gone & before

    def _look(self, call: _Call, gone: set[str]) -> None:
        if call.exchange.client_gone():
            call.exchange.refuse(RefusalCode.CANCELLED, "the request was cancelled")
        lost = "the model's process has ended" if call.process in gone else self._overdue(call)
        if lost is not None:
            call.exchange.refuse(RefusalCode.UNAVAILABLE, lost, row=call.row)
            # The row's thread may wait for ever; nothing can be done about it.
            self._calls.pop(call.id, None)
        elif call.exchange.closed and call.asked is not None and not call.cancelling:
            # Repeated until the row ends: a cancel can overtake the request that it is meant for.
            call.cancelling = True
            threading.Thread(target=self._cancel, args=(call,), name=f"cancel-{call.id}", daemon=True).start()

    def _overdue(self, call: _Call) -> str | None:
        if call.process is not None or call.asked is None:
            return None
        overdue = time.monotonic() - call.asked > self._accept_timeout_s
        return "the model did not take the request in time" if overdue else None

    def _cancel(self, call: _Call) -> None:
        try:
            self._caller.cancel(call.id)
        except StreamRefusedError as error:
            log.info("a cancel did not arrive: %s", error)
        finally:
            call.cancelling = False
