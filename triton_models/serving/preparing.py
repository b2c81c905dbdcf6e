"""The threads between a request's arrival and its place in the engine's waiting list."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from triton_models.serving.open_request import OpenRequest
from triton_models.text.grammars import CompiledGrammar
from wire.sampling import Generation

Compiled = Future[CompiledGrammar | None]

COMPILERS = 2
"""Grammars that are compiled at once; each takes a processor away from the model."""

_Inputs = TypeVar("_Inputs")


class Preparing(Generic[_Inputs]):
    """Prepares requests in their order, one at a time, but those with a grammar once that is compiled.

    Compiling may take a second, and no other request shall wait for it.

    Args:
        compile_grammar: returns what a generation's answer is held to; may raise.
        prepare: takes a request, its inputs and what became of compiling, None where there was no need.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Generation], CompiledGrammar | None],
        prepare: Callable[[OpenRequest, _Inputs, Compiled | None], None],
    ) -> None:
        self._compile_grammar = compile_grammar
        self._prepare = prepare
        self._intake = ThreadPoolExecutor(max_workers=1, thread_name_prefix="intake")
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")

    def submit(self, request: OpenRequest, inputs: _Inputs) -> None:
        """Have a request prepared."""
        if request.generation.grammar is None:
            self._intake.submit(self._prepare, request, inputs, None)
            return
        compiling = self._compilers.submit(self._compile_grammar, request.generation)
        compiling.add_done_callback(
            lambda compiled: self._intake.submit(self._prepare, request, inputs, compiled)
        )

    def close(self) -> None:
        """Prepare what was submitted, and join the threads."""
        self._compilers.shutdown(wait=True)  # first, since it hands on to the other
        self._intake.shutdown(wait=True)
