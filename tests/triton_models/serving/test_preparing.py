import threading
from typing import Any

from tests.triton_models.serving.fakes import FakeResponder, wait_until
from triton_models.errors import InvalidGrammarError
from triton_models.serving.open_request import OpenRequest
from triton_models.serving.preparing import Preparing
from wire.grammar import Grammar
from wire.sampling import Generation


def opened(key: str, *, held: bool = False) -> OpenRequest:
    grammar = Grammar("regex", "a") if held else None
    return OpenRequest(key, Generation(grammar=grammar), FakeResponder())


def test_nobody_waits_for_a_grammar_that_is_compiled() -> None:
    compiled = threading.Event()
    prepared: list[tuple[str, str, Any]] = []

    def compile_grammar(generation: Generation) -> None:
        assert compiled.wait(20)

    preparing = Preparing[str](
        compile_grammar, lambda request, inputs, future: prepared.append((request.key, inputs, future))
    )
    preparing.submit(opened("held", held=True), "a")
    preparing.submit(opened("free"), "b")
    wait_until(lambda: bool(prepared))
    assert prepared == [("free", "b", None)]
    compiled.set()
    preparing.close()
    (_, (key, inputs, future)) = prepared
    assert (key, inputs) == ("held", "a")
    assert future is not None
    assert future.result() is None


def test_what_compiling_raises_is_told_where_the_request_is_prepared() -> None:
    errors: list[BaseException | None] = []

    def compile_grammar(generation: Generation) -> None:
        raise InvalidGrammarError("broken")

    preparing = Preparing[str](
        compile_grammar, lambda _request, _inputs, future: errors.append(future and future.exception())
    )
    preparing.submit(opened("held", held=True), "a")
    preparing.close()
    (error,) = errors
    assert isinstance(error, InvalidGrammarError)
