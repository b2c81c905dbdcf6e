"""The threads between a request's arrival and its place in the engine's waiting list."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from triton_models.errors import QueueFullError
from triton_models.serving.open_request import OpenRequest
from triton_models.text.grammars import CompiledGrammar
from wire.grammar import Grammar
from wire.sampling import Generation

Compiled = Future[CompiledGrammar | None]

COMPILERS = 2
"""Grammars compiled at the same time; each takes a CPU core away from the model."""

WAITING: Final = 128
"""Most different grammars that are being compiled or wait for it: at the very worst, a minute's work.
Requests get no response until they are accepted, so no more may wait."""

_Inputs = TypeVar("_Inputs")


class Preparing(Generic[_Inputs]):
    """Prepares requests in order, one at a time; those with a grammar, once the grammar is compiled.

    Compiling may take a second, and other requests must not wait for it. Nothing is compiled for a request
    that was given up, nor while closing: `prepare` then gets no grammar, but refuses the request for the same
    reason.

    Args:
        compile_grammar: returns a generation's compiled grammar; may raise.
        prepare: called with a request, its inputs and the result of compiling; None if there was no grammar.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Generation], CompiledGrammar | None],
        prepare: Callable[[OpenRequest, _Inputs, Compiled | None], None],
    ) -> None:
        self._compile_grammar = compile_grammar
        self._prepare = prepare
        self._lock = threading.RLock()
        """Reentrant, because cancelling a future runs its callback on the same thread at once."""
        self._waiting: Counter[Grammar] = Counter()
        """How many requests wait for each grammar."""
        self._compiling: dict[OpenRequest, Compiled] = {}
        """The compilations that wait or run."""
        self._closing = threading.Event()
        self._intake = ThreadPoolExecutor(max_workers=1, thread_name_prefix="intake")
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def submit(self, request: OpenRequest, inputs: _Inputs) -> None:
        """Queue a request to be prepared.

        Raises:
            QueueFullError: too many grammars wait to be compiled.
        """
        grammar = request.generation.grammar
        if grammar is None:
            self._intake.submit(self._prepare, request, inputs, None)
            return
        with self._lock:
            if grammar not in self._waiting and len(self._waiting) >= WAITING:
                raise QueueFullError(f"{len(self._waiting)} grammars wait to be compiled already")
            self._waiting[grammar] += 1
            compiling = self._compiling[request] = self._compilers.submit(self._compile, request)

        def compiled(future: Compiled) -> None:
            self._leave(request, grammar)
            self._intake.submit(self._prepare, request, inputs, future)

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

    def close(self) -> None:
        """Prepare what was submitted, without grammars that are not compiled yet, and join the threads."""
        with self._lock:
            self._closing.set()
        self._compilers.shutdown(wait=True)  # first, since it passes requests on to the intake
        self._intake.shutdown(wait=True)
