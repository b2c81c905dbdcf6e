"""The way in: the threads between a request's arrival and its place in the engine's waiting list.

One takes requests in the order of their arrival, decodes them, and answers at once what it can, such as
probes. One prepares generations, since rendering and tokenizing a long prompt may take seconds. Two compile
grammars, which may take a second each; other requests must not wait for that.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from triton_models.errors import EngineStoppedError, QueueFullError
from triton_models.serving.outbox import Responder
from triton_models.serving.request import OpenRequest
from triton_models.serving.worker import Worker
from triton_models.signature import INPUTS
from triton_models.text.grammars import CompiledGrammar
from wire.request import Generation

if TYPE_CHECKING:
    from wire.grammar import Grammar

log = logging.getLogger(__name__)

COMPILERS: Final = 2
"""Grammars compiled at the same time; each takes a CPU core away from the model."""

GRAMMARS_WAITING: Final = 128
"""Most different grammars that are being compiled or wait for it: at the very worst, a minute's work."""


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


def read_arrival(request: Any, *, pb_utils: Any, traced: bool) -> Arrival | None:
    """Copy what is needed of Triton's request. Nothing refers to it afterwards, so its memory becomes free.

    Args:
        request: of Triton's Python backend.
        pb_utils: `triton_python_backend_utils`.
        traced: whether its trace context is read.

    Returns:
        None if nothing can be sent to its client.
    """
    sender = context = inputs = None
    try:
        sender = request.get_response_sender()
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
    return None if sender is None else Arrival(Responder(sender, pb_utils, context), inputs)


class Intake:
    """Takes requests in order, and prepares generations, those with a grammar once it is compiled.

    Nothing is compiled for a request that was given up, nor while closing: it is prepared without its
    grammar, and refused for the same reason.

    Args:
        take: called with each arrival; calls `begin` for generations.
        prepare: called with a request whose grammar, if it has one, is in `compiling`.
        compile_grammar: returns a generation's compiled grammar; may raise.
    """

    def __init__(
        self,
        take: Callable[[Arrival], object],
        prepare: Callable[[OpenRequest], object],
        compile_grammar: Callable[[Generation], CompiledGrammar | None],
    ) -> None:
        self._compile_grammar = compile_grammar
        self._taking = Worker("intake", take)
        self._preparing = Worker("preparing", prepare)
        self.workers = (self._taking, self._preparing)
        self._lock = threading.RLock()
        """Reentrant, because cancelling a future runs its callback on the same thread at once."""
        self._waiting: Counter[Grammar] = Counter()
        """How many requests wait for each grammar."""
        self._closing = threading.Event()
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def close(self) -> None:
        """Prepare what was submitted, without grammars that are not compiled yet, and join the threads."""
        with self._lock:
            self._closing.set()
        self._taking.stop()
        self._compilers.shutdown(wait=True)  # before the thread to which it passes requests on
        self._preparing.stop()

    def submit(self, batch: Iterable[Arrival]) -> None:
        """Queue requests; called by Triton's thread, never waits."""
        for arrival in batch:
            self._taking.put(arrival)

    def begin(self, request: OpenRequest) -> None:
        """Queue a generation to be prepared; called by `take`.

        Raises:
            QueueFullError: too many grammars wait to be compiled.
            EngineStoppedError: the intake is closing.
        """
        grammar = request.generation.grammar
        if grammar is None:
            self._preparing.put(request)
            return
        with self._lock:
            if self._closing.is_set():
                raise EngineStoppedError("the model is being unloaded")
            if grammar not in self._waiting and len(self._waiting) >= GRAMMARS_WAITING:
                raise QueueFullError(f"{len(self._waiting)} grammars wait to be compiled already")
            request.compiling = self._compilers.submit(self._compile, request)
            self._waiting[grammar] += 1

        def compiled(_: Future[CompiledGrammar | None]) -> None:
            with self._lock:
                self._waiting[grammar] -= 1
                if not self._waiting[grammar]:
                    del self._waiting[grammar]
            self._preparing.put(request)

        request.compiling.add_done_callback(compiled)
        if request.given_up() is not None:
            self.give_up(request)  # it may have been given up before it was `compiling`

    def give_up(self, request: OpenRequest) -> None:
        """Prepare a cancelled or late request at once, without its grammar unless that is being compiled."""
        with self._lock:
            if (compiling := request.compiling) is not None and not self._closing.is_set():
                compiling.cancel()

    def _compile(self, request: OpenRequest) -> CompiledGrammar | None:
        if self._closing.is_set() or request.given_up() is not None:
            return None
        return self._compile_grammar(request.generation)
