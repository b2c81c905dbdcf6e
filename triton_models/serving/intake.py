"""The way in: the threads between a request's arrival and its place in the engine's waiting list.

* `Intake` has one thread that takes requests in the order of their arrival and decodes them, and one that
  prepares generations: rendering and tokenizing a long prompt may take seconds, and what is answered at once,
  such as a probe, must not wait for it.
* Two threads compile grammars, which may take a second each; other requests must not wait for that.
* `Tokenizing` has a thread that counts tokens, while the engine is full, too.
"""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from triton_models.errors import EngineStoppedError, QueueFullError
from triton_models.serving.outbox import Call, Pulse, Responder, Sender, TritonResponder, refusal
from triton_models.serving.request import OpenRequest
from triton_models.signature import INPUTS
from triton_models.text.grammars import CompiledGrammar
from wire.grammar import Grammar
from wire.meta import Meta, Tokenized
from wire.refusal import RefusalCode
from wire.request import Detokenize, Generation, Tokenize

log = logging.getLogger(__name__)

COMPILERS: Final = 2
"""Grammars compiled at the same time; each takes a CPU core away from the model."""

GRAMMARS_WAITING: Final = 128
"""Most different grammars that are being compiled or wait for it: at the very worst, a minute's work.
Requests get no response until they are accepted, so no more may wait."""

TEXTS_WAITING: Final = 64
"""Requests that may wait to be tokenized. One is handled at a time, so the wait is at most about a second,
unless texts are very long."""

LONGEST_WAIT_S: Final = 60.0
"""How long a request may wait to be tokenized, unless its own deadline is earlier."""

Compiled = Future[CompiledGrammar | None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The three tensors of one request, as bytes."""

    prompt: bytes
    history: bytes
    sampling: bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as `execute` hands it over."""

    responder: Responder
    inputs: Inputs | None
    """None: the tensors could not be read. Each must hold exactly one string."""


def read_arrival(request: Any, *, pb_utils: Any, traced: bool) -> Arrival:
    """Copy what is needed of Triton's request. Nothing refers to it afterwards, so its memory becomes free.

    Args:
        request: of Triton's Python backend.
        pb_utils: `triton_python_backend_utils`.
        traced: whether its trace context is read.
    """
    sender = request.get_response_sender()
    context = inputs = None
    try:
        tensors = (pb_utils.get_input_tensor_by_name(request, name) for name in INPUTS)
        # A client may have put several strings into one request.
        ((prompt,), (history,), (sampling,)) = (tensor.as_numpy().ravel().tolist() for tensor in tensors)
        inputs = Inputs(prompt, history, sampling)
        if traced:
            # Triton's own span for the request or, if it made none, the caller's: the parameters are a JSON
            # object too, with the headers that were forwarded.
            context = request.trace().get_context() or request.parameters()
    except Exception as error:  # noqa: BLE001 - confined to one request, which is refused
        log.warning("a request could not be read: %s", error)
    return Arrival(TritonResponder(sender, pb_utils, context), inputs)


@dataclass(frozen=True, slots=True)
class _Generation:
    """A generation that is ready to be prepared."""

    request: OpenRequest
    inputs: Inputs
    compiled: Compiled | None = None


class Intake:
    """Takes requests in order, and prepares generations, those with a grammar once it is compiled.

    Nothing is compiled for a request that was given up, nor while closing: `prepare` then gets no grammar,
    but refuses the request for the same reason.

    Args:
        take: called with each arrival; has `begin` called for generations.
        prepare: called with a request, its inputs and the result of compiling; None if there was no grammar.
        compile_grammar: returns a generation's compiled grammar; may raise.
    """

    def __init__(
        self,
        take: Callable[[Arrival], object],
        prepare: Callable[[OpenRequest, Inputs, Compiled | None], object],
        compile_grammar: Callable[[Generation], CompiledGrammar | None],
    ) -> None:
        self.pulses = (Pulse(), Pulse())
        """Of the two threads."""
        self._take = take
        self._prepare = prepare
        self._compile_grammar = compile_grammar
        self._arrived: queue.SimpleQueue[Sequence[Arrival] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[_Generation | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        """Reentrant, because cancelling a future runs its callback on the same thread at once."""
        self._waiting: Counter[Grammar] = Counter()
        """How many requests wait for each grammar."""
        self._compiling: dict[OpenRequest, Compiled] = {}
        """The compilations that wait or run."""
        self._closing = threading.Event()
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._taker = threading.Thread(target=self._take_all, name="intake", daemon=True)
        self._preparer = threading.Thread(target=self._prepare_all, name="preparing", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._taker.start()
        self._preparer.start()

    def close(self) -> None:
        """Prepare what was submitted, without grammars that are not compiled yet, and join the threads."""
        with self._lock:
            self._closing.set()
        self._arrived.put(None)
        self._taker.join()
        self._compilers.shutdown(wait=True)  # before the thread to which it passes requests on
        self._ready.put(None)
        self._preparer.join()

    def submit(self, batch: Sequence[Arrival]) -> None:
        """Queue requests; called by Triton's thread, never waits."""
        self._arrived.put(batch)

    def begin(self, request: OpenRequest, inputs: Inputs) -> None:
        """Queue a generation to be prepared; called by `take`.

        Raises:
            QueueFullError: too many grammars wait to be compiled.
            EngineStoppedError: the intake is closing.
        """
        grammar = request.generation.grammar
        if grammar is None:
            self._ready.put(_Generation(request, inputs))
            return
        with self._lock:
            if self._closing.is_set():
                raise EngineStoppedError("the model is being unloaded")
            if grammar not in self._waiting and len(self._waiting) >= GRAMMARS_WAITING:
                raise QueueFullError(f"{len(self._waiting)} grammars wait to be compiled already")
            compiling = self._compilers.submit(self._compile, request)
            self._waiting[grammar] += 1
            self._compiling[request] = compiling

        def compiled(future: Compiled) -> None:
            self._leave(request, grammar)
            self._ready.put(_Generation(request, inputs, future))

        compiling.add_done_callback(compiled)
        if request.given_up() is not None:
            self.give_up(request)  # it may have been given up before it was in `_compiling`

    def give_up(self, request: OpenRequest) -> None:
        """Prepare a cancelled or late request at once, without its grammar unless that is being compiled."""
        with self._lock:
            compiling = self._compiling.get(request)
            if compiling is not None and not self._closing.is_set():
                compiling.cancel()

    def _compile(self, request: OpenRequest) -> CompiledGrammar | None:
        if self._closing.is_set() or request.given_up() is not None:
            return None
        return self._compile_grammar(request.generation)

    def _leave(self, request: OpenRequest, grammar: Grammar) -> None:
        with self._lock:
            del self._compiling[request]
            self._waiting[grammar] -= 1
            if not self._waiting[grammar]:
                del self._waiting[grammar]

    def _take_all(self) -> None:
        pulse = self.pulses[0]
        try:
            while (batch := self._arrived.get()) is not None:
                pulse.work()
                self._take_batch(batch)
                del batch  # so that nothing refers to what has ended
                pulse.rest()
        finally:
            pulse.work()  # for good: a thread that has ended must not look healthy

    def _take_batch(self, batch: Sequence[Arrival]) -> None:
        for arrival in batch:
            self._guarded(partial(self._take, arrival))

    def _prepare_all(self) -> None:
        pulse = self.pulses[1]
        try:
            while (ready := self._ready.get()) is not None:
                pulse.work()
                self._guarded(partial(self._prepare, ready.request, ready.inputs, ready.compiled))
                del ready
                pulse.rest()
        finally:
            pulse.work()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            # The thread's outermost frame. `take` and `prepare` answer a request whose handling fails.
            log.exception("a request could not be handled")


class TextCall(Call):
    """A request to tokenize.

    Attributes:
        deadline: when it is given up if it still waits, in monotonic seconds.
        left: whether its client has left.
    """

    def __init__(self, request: Tokenize | Detokenize, inputs: Inputs, responder: Responder) -> None:
        super().__init__("tokenize", responder)
        self.request = request
        self.inputs = inputs
        limit_ms = request.deadline_ms or LONGEST_WAIT_S * 1000
        self.deadline = self.last_sent + min(LONGEST_WAIT_S, limit_ms / 1000)
        self.left = False

    def gone(self) -> None:
        """Note that the client has left."""
        self.left = True


class Tokenizing:
    """Answers requests to tokenize one at a time, in order, on a thread of its own.

    Args:
        tokenize: returns the text and the document of a request's answer; may raise.
        sender: sends the answers.
    """

    def __init__(
        self,
        tokenize: Callable[[TextCall], tuple[str, Tokenized]],
        sender: Sender,
    ) -> None:
        self._tokenize = tokenize
        self._sender = sender
        self._queue: queue.SimpleQueue[TextCall | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenizing", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Refuse all requests that wait, and join the thread; no request may follow."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def submit(self, call: TextCall) -> None:
        """Queue a request; its answer follows. Never waits.

        Raises:
            QueueFullError: `TEXTS_WAITING` requests wait.
        """
        if (waiting := self._queue.qsize()) >= TEXTS_WAITING:
            raise QueueFullError(f"{waiting} requests wait to be tokenized already")
        self._queue.put(call)
        self._sender.watch(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                self._answer(call)
            except Exception as error:  # noqa: BLE001 - confined to one request: its client is told
                self._sender.refuse(call, *refusal(error))
            del call  # so that nothing refers to what has ended

    def _answer(self, call: TextCall) -> None:
        if self._closing.is_set():
            raise EngineStoppedError("the model is being unloaded")
        if call.left:
            self._sender.refuse(call, RefusalCode.CANCELLED, "the request was cancelled")
        elif time.monotonic() > call.deadline:
            self._sender.refuse(call, RefusalCode.DEADLINE_EXCEEDED, "the request's time is over")
        else:
            text, tokenized = self._tokenize(call)
            self._sender.post(call, partial(call.send, text, Meta(tokenized=tokenized), final=True))
